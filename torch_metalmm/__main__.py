"""`python -m torch_metalmm` is the `metalmm` command."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

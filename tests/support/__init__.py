"""Helpers of the tests. Importing this package puts them on sys.path, each by its plain name."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (_HERE, _HERE / "macos", _HERE / "models")]

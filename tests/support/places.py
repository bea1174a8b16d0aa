"""Where the repository, its tests and a compiler lie."""

from __future__ import annotations

import os
import shlex
from importlib.metadata import distribution
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# For programs of this machine; several words may be given: ccache g++.
COMPILER = shlex.split(os.environ.get("CXX", "c++"))


def mlx_include() -> Path:
    """MLX's headers, which its package has on every platform.

    Its module would not do: mlx is a namespace, which tests/files/mlx may be a part of.
    """
    return Path(str(distribution("mlx").locate_file("mlx/include")))

"""Helpers of the tests. Importing this package puts its folders on sys.path, for plain names, and
the root of the repository, for bench."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
_ROOMS = ("attention", "experts", "macos", "models", "outside")
sys.path[:0] = [str(folder) for folder in (_HERE.parents[1], _HERE, *map(_HERE.joinpath, _ROOMS))]

"""Helpers of the tests. Importing this package puts its folders on sys.path, for plain names."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [
    str(folder)
    for folder in (_HERE, *(_HERE / name for name in ("attention", "experts", "macos", "models")))
]

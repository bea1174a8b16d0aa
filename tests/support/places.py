"""Where the repository and its tests lie."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def mlx_include() -> Path:
    """MLX's headers, which its package has on every platform."""
    spec = importlib.util.find_spec("mlx")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "include"

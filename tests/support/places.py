"""Where the repository and its tests lie."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def mlx_include() -> Path:
    """MLX's headers, which its package has on every platform.

    Its module would not do: mlx is a namespace, which tests/files/mlx may be a part of.
    """
    return Path(str(distribution("mlx").locate_file("mlx/include")))

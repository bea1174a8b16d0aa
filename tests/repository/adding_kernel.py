"""Runs one kernel of a tree on the emulator: the pass that adding_plan printed.

x W^T + nothing, with 2 rows of x, against the Python class of the same tree. Prints "right".
"""

from __future__ import annotations

import sys

import torch

from torch_metalmm import _C, formats
from torch_metalmm.msl.kernels import shader_of
from torch_metalmm.testing import shader_library

M, N, K = 2, 48, 160


def main() -> None:
    kernel, grid, group, threadgroup_bytes, constants, args = sys.stdin.read().splitlines()
    name = shader_of(kernel).format
    g = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=g)
    packed = formats.get(name).quantize(torch.randn(N, K, generator=g))
    w = formats.get(name).dequantize(packed, K)
    y = torch.full((M, N), torch.nan)
    absent = torch.full((1,), torch.nan)
    none = [None] * (_C.SLOTS.index("args") - _C.SLOTS.index("c") - 1)
    shader_library(kernel).function(kernel, dict(enumerate(map(int, constants.split()))))(
        [int(v) for v in grid.split()],
        int(group),
        [x, packed, y, absent, absent, *none, bytes.fromhex(args)],
        [int(threadgroup_bytes)],
    )
    bound = K * 2.0**-23 * (x.double().abs() @ w.double().abs().T)
    error = (y.double() - x.double() @ w.double().T).abs()
    assert bool((error <= bound).all()), f"{kernel}: y is off by {error.max()}"
    print("right")


if __name__ == "__main__":
    main()

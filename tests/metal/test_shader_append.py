"""rope_append on the lockstep emulator: quantizers, strides, slots that are not there."""

from __future__ import annotations

import pytest
import torch
from cache_cases import pack
from inputs import activations, generator
from oracle import DTYPES
from plan_cases import stored
from shaders import execute
from torch import Tensor

from torch_metalmm import formats

pytestmark = pytest.mark.shaders

DIM = 64


def hard_blocks() -> Tensor:
    """f32 [N, DIM]: ties, edges of codes, equals, zeros of both signs, outliers, single values."""
    few = torch.randint(-9, 10, (64, DIM), generator=generator("few")) / 2.0
    edges = (torch.arange(DIM).repeat(8, 1) - 31.5) * torch.tensor([1, -1, 2, 3, 7, 15, 31, 127.0])[
        :, None
    ]
    signs = torch.where(torch.arange(DIM) % 3 == 0, -2.0, 2.0).repeat(4, 1)
    signs[1] *= -1
    signs[2, :32], signs[3, 32:] = 0.0, -0.0
    zeros = torch.zeros(4, DIM)
    zeros[1] = -0.0
    zeros[2, ::2] = -0.0
    zeros[3, 5:] = -0.0
    single = torch.eye(DIM) * 3 - torch.eye(DIM).roll(7, 1)
    low, high = zeros.clone(), zeros.clone()
    low[:, 9], high[:, 40] = -5.0, 5.0
    scales = torch.randn(64, DIM, generator=generator("scales"))
    scales *= 2.0 ** torch.arange(-48, 16)[:, None]
    random = torch.randn(128, DIM, generator=generator("random"))
    return torch.cat([few, edges, signs, zeros, single, low, high, scales, random, random.exp()])


def append(name: str, k: Tensor, v: Tensor, slots: Tensor, capacity: int) -> list[Tensor]:
    """Keys and values after rows [M, D] of one head, bytes 0xFF before."""
    m, dim = k.shape
    row = formats.get(name).row_bytes(dim)
    caches = [torch.full((capacity, row), 255, dtype=torch.uint8) for _ in range(2)]
    execute(
        "rope_append",
        {"x": k, "x2": v, "ids": slots, "weight": caches[0], "weight2": caches[1],
         "y": torch.zeros(1, dtype=k.dtype)},
        m=m, n=capacity, k=dim, format=name,
        rope={"heads": 0, "positions": m, "angle_rows": m, "v_apart": True},
    )  # fmt: skip
    return caches


@pytest.mark.parametrize("name", stored())
def test_bytes_are_those_of_the_specification(name: str) -> None:
    rows = hard_blocks()
    keys, values = (rows[i::2].contiguous() for i in range(2))
    got = append(name, keys, values, torch.arange(len(keys)), len(keys))
    for one, of in zip(got, (keys, values), strict=True):
        want = pack(name, of)
        if name == "iq4_nl":  # sixth powers of what f16 has no scale for may be subnormal
            blocks = [t.view(-1, formats.get(name).block_bytes) for t in (one, want)]
            scales = [b[:, :2].contiguous().view(torch.float16) for b in blocks]
            one, want = (b * (d != 0) for b, d in zip(blocks, scales, strict=True))
            assert torch.equal(*scales)
        assert torch.equal(one, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slot_that_is_not_there_is_not_written(dtype: torch.dtype) -> None:
    rows = activations(5, DIM, dtype=dtype)
    slots = torch.tensor([2, -1, 3, 0, 2**40])
    for name in ("q8_0", "f16"):
        want = torch.full((3, formats.get(name).row_bytes(DIM)), 255, dtype=torch.uint8)
        want[slots[[0, 3]]] = pack(name, rows[[0, 3]]).view(torch.uint8)
        got = append(name, rows, rows, slots, 3)
        assert torch.equal(got[0], want) and torch.equal(got[1], want)

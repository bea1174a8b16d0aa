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
    random = torch.randn(512, DIM, generator=generator("random"))
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
    got = append(name, rows, rows.flip(0), torch.arange(len(rows)), len(rows))
    for one, values in zip(got, (rows, rows.flip(0)), strict=True):
        want = pack(name, values)
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


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", stored())
def test_a_block_without_a_number_decodes_to_none(name: str, number: float) -> None:
    rows = activations(2, DIM)
    rows[0, 3] = rows[1, 40] = number
    got, _ = append(name, rows, rows, torch.arange(2), 2)
    is_dense = formats.get(name).block_values == 1
    decoded = formats.get(name).dequantize(got, DIM)
    lost = ~decoded.view(2, 2, 32).isfinite()
    if is_dense:
        assert torch.equal(lost.view(2, DIM), ~rows.isfinite())
    else:
        assert torch.equal(lost.all(-1), torch.tensor([[True, False], [False, True]]))
        assert torch.equal(lost.any(-1), lost.all(-1))


@pytest.mark.parametrize("name", ["q5_1", "bf16"])
def test_strides(name: str) -> None:
    """Sequences, heads and rows of k, of v and of the cache, each apart; what is between stays."""
    batch, kv_heads, positions, capacity = 2, 3, 2, 4
    row = formats.get(name).row_bytes(DIM)
    k = activations(kv_heads, batch, positions, DIM + 3, seed="k")[..., :DIM].transpose(0, 1)
    v = activations(batch, positions, kv_heads, DIM + 5, seed="v")[..., :DIM].transpose(1, 2)
    slots = torch.tensor([3, 1])
    heads = {f"{x}_head_stride": t.stride(1) for x, t in (("x", k), ("x2", v))}
    sequences = {f"{x}_sequence_stride": t.stride(0) for x, t in (("x", k), ("x2", v))}
    slot, gap = row + 8, 16
    head = slot * capacity + gap
    last = (batch * kv_heads - 1) * head + (capacity - 1) * slot + row
    keys, values = (torch.full((last,), 255, dtype=torch.uint8) for _ in range(2))
    memory = [t.untyped_storage() for t in (k, v)]
    x, x2 = (torch.tensor([], dtype=torch.float32).set_(m) for m in memory)
    # Nothing behind the last value.
    x, x2 = x[:-3].clone(), x2[:-5].clone()
    execute(
        "rope_append",
        {"x": x, "x2": x2, "ids": slots, "weight": keys, "weight2": values, "y": torch.zeros(1)},
        m=batch * positions, n=capacity, k=DIM, format=name,
        rope={"heads": 0, "kv_heads": kv_heads, "positions": positions, "angle_rows": positions,
              "v_apart": True},
        x_stride=k.stride(2), x2_stride=v.stride(2), w_stride=slot, w2_stride=slot,
        append=heads | sequences | {"head_stride": head, "sequence_stride": kv_heads * head,
                                    "head2_stride": head, "sequence2_stride": kv_heads * head},
    )  # fmt: skip
    for got, rows in ((keys, k), (values, v)):
        want = torch.full((last,), 255, dtype=torch.uint8)
        view = want.as_strided((batch, kv_heads, capacity, row), (kv_heads * head, head, slot, 1))
        view[:, :, slots] = pack(name, rows).view(torch.uint8)
        assert torch.equal(got, want)

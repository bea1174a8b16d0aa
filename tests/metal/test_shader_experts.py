"""The shaders of experts on the emulator, memory ending where operands end: see shaders.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_cases import Experts, decoded, gated, products, rows, weighted, weights
from inputs import activations
from oracle import DTYPES, FORMATS, Value, check
from shaders import execute, memory_of
from torch import Tensor

from torch_metalmm import formats

pytestmark = pytest.mark.shaders

GAP = 16  # values of x, bytes of W


def experts_in_memory(packed: Tensor, gap: int) -> tuple[Tensor, dict[str, int]]:
    """W of experts, `gap` bytes between rows and twice as many between experts, and its strides."""
    e, n, row = packed.shape
    stride = n * (row + gap) + gap
    memory = torch.full((stride * e - 2 * gap,), 255, dtype=torch.uint8)
    memory.as_strided((e, n, row), (stride, row + gap, 1)).copy_(packed)
    return memory, {"row": row + gap, "expert": stride}


def call(
    op: str, name: str, s: Experts, x: Tensor, packed: Tensor, ids: Tensor, m: int, gap: int,
    more: dict[str, Tensor], **sizes: Any,
) -> Tensor:  # fmt: skip
    """y of a plan of `op`, m rows."""
    memory, strides = experts_in_memory(packed, gap)
    bias = more.get("bias")
    y = torch.full((m, s.n), torch.nan, dtype=x.dtype)
    buffers = {"x": memory_of(x, gap), "weight": memory, "ids": ids, "y": y, **more}
    if op == "expert_up":
        second, others = experts_in_memory(packed.flip(1), 2 * gap)
        buffers["weight2"] = second
        sizes |= {"stride2": others["expert"]}
    asked: dict[str, Any] = {"m": m, "n": s.n, "k": s.k, "format": name}
    asked |= {"x_stride": s.k + gap, "w_stride": strides["row"], "bias": bias is not None}
    asked |= {"w2_stride": others["row"]} if op == "expert_up" else {}
    sizes |= {"experts": s.experts, "stride": strides["expert"]}
    return execute(op, buffers, **asked, experts=sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_kernels(name: str, dtype: torch.dtype) -> None:
    """N with a tail; rows and experts that follow each other, and with gaps."""
    block = formats.get(name).block_values
    s = Experts(3, n=5, k=37 if block == 1 else 3 * block, tokens=2, choices=3)
    packed, ids = weights(name, s), torch.tensor([[2, 0, 2], [1, 1, 0]])
    w, x = decoded(name, packed, s.k), rows(s, dtype) / 16
    bias = activations(s.experts, 2 * s.n, dtype=dtype, seed="bias")
    scores = activations(s.tokens, s.choices, dtype=dtype, seed="scores")
    gate, up = products(x, w, ids), products(x, w.flip(1), ids)
    half = bias[:, : s.n].contiguous()
    for gap in (0, GAP):
        flat = ids.flatten()
        y = call("expert_linear", name, s, x, packed, flat, 6, gap, {"bias": half}, sharing=3)
        want = gate + Value.of(half[ids])
        check(y.view(2, 3, s.n), want.store(dtype), f"{name} gemv {gap}")
        more = {"bias": half, "x2": scores}
        y = call(
            "expert_down", name, s, x, packed, flat, 2, gap, more, sharing=3, choices=3,
            float_scores=dtype == torch.float32,
        )  # fmt: skip
        check(y, weighted(want, scores).store(dtype), f"{name} down {gap}")
        for alternates in (False, True):
            y = call(
                "expert_up", name, s, x, packed, flat, 6, gap, {"bias": bias}, sharing=3,
                alternates=alternates, limit=0.5, is_oai=True, alpha=1.5,
            )  # fmt: skip
            parts = (bias[:, ::2], bias[:, 1::2]) if alternates else bias.split(s.n, 1)
            a, b = (v + Value.of(p[ids]) for v, p in zip((gate, up), parts, strict=True))
            want_up = gated(a, b, "swiglu_oai", 0.5, 1.5).store(dtype)
            check(y.view(2, 3, s.n), want_up, f"{name} up {gap} {alternates}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_tiles(name: str, dtype: torch.dtype) -> None:
    """A tile of each of two experts, and between them one of none, whose results stay unwritten."""
    block = formats.get(name).block_values
    s = Experts(3, n=5, k=37 if block == 1 else 3 * block, tokens=24, choices=1)
    packed, x = weights(name, s), rows(s, dtype) / 16
    w, of_tiles = decoded(name, packed, s.k), torch.tensor([2, -1, 0])
    y = call("expert_tiles", name, s, x, packed, of_tiles, 24, GAP, {}, tile_rows=8)
    ids, halved = of_tiles.clamp(0).repeat_interleave(8)[:, None], dtype == torch.float16
    want = products(x, w, ids, None, halved)
    written = torch.cat([torch.arange(8), torch.arange(16, 24)])
    exact, error = want.exact[written, 0], want.error[written, 0]
    check(y[written], Value(exact, error).store(dtype), name)
    assert y[8:16].isnan().all()


def test_ids_out_of_range_are_the_nearest_expert() -> None:
    """The host checks ids where it has them; a kernel that is given a wrong one stays inside W."""
    s = Experts(3, n=4, k=32, tokens=4, choices=1)
    packed, x = weights("q4_0", s), rows(s, torch.float32)
    ids = torch.tensor([-1, 3, 2**40, -(2**62)])
    nearest = ids.clamp(0, 2)
    scores = torch.ones(4, 1)
    for op, more in (("expert_linear", {}), ("expert_up", {}), ("expert_down", {"x2": scores})):
        extra = {"float_scores": True} if more else {}
        got, want = (
            call(op, "q4_0", s, x, packed, i, 4, 0, dict(more), **extra) for i in (ids, nearest)
        )
        assert torch.equal(got, want) and not got.isnan().any(), op


@pytest.mark.parametrize("choices", [1, 2, 3, 5, 8, 11])
def test_simdgroups_share_the_choices(choices: int) -> None:
    """8 simdgroups: several for a choice, one, or several choices for one."""
    s = Experts(4, n=9, k=2048, tokens=2, choices=choices)
    packed = weights("q8_0", s)
    ids = (torch.arange(2 * choices) % 4).view(2, choices)
    x, w = rows(s, torch.float32, apart=True), decoded("q8_0", packed, s.k)
    scores = activations(2, choices, seed="scores")
    y = call(
        "expert_down", "q8_0", s, x.flatten(0, 1), packed, ids.flatten(), 2, 0, {"x2": scores},
        choices=choices, float_scores=True,
    )  # fmt: skip
    check(y, weighted(products(x, w, ids), scores).store(torch.float32), f"{choices}")

"""rope on the lockstep emulator: heads, layouts, operands that are absent, strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from inputs import activations
from layer_oracle import normalized, rotated
from oracle import DTYPES, Value, check
from shaders import execute, memory_of
from torch import Tensor

pytestmark = pytest.mark.shaders

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sequences, positions, heads of q and of k and v, values of a head, of which some rotate."""

    batch: int
    positions: int
    heads: int
    kv_heads: int
    dim: int
    rotated: int


SHAPES = (
    Shape(1, 1, 3, 1, 64, 64),
    Shape(2, 3, 2, 2, 48, 32),
    Shape(1, 5, 4, 2, 80, 0),
    Shape(3, 2, 1, 1, 7, 6),
    Shape(1, 2, 2, 1, 256, 130),
)


def heads_of(rows: Tensor, s: Shape) -> Tensor:
    """[B S, heads D] as [B, heads, S, D]."""
    return rows.view(s.batch, s.positions, -1, s.dim).transpose(1, 2)


def run(s: Shape, buffers: dict[str, Any], strides: dict[str, int], **flags: Any) -> list[Tensor]:
    """q, k and v."""
    sizes = {"heads": s.heads, "kv_heads": s.kv_heads, "rotated": s.rotated, **flags}
    dtype = buffers["x"].dtype
    kv = (s.batch, s.kv_heads, s.positions, s.dim)
    q = torch.full((s.batch, s.heads, s.positions, s.dim), torch.nan, dtype=dtype)
    k, v = (torch.full(kv, torch.nan, dtype=dtype) for _ in range(2))
    execute(
        "rope", buffers | {"y": q, "y2": k, "y3": v}, m=s.batch * s.positions, k=s.dim,
        eps=EPS, offset=1.0, rope=sizes | {"positions": s.positions}, **strides,
    )  # fmt: skip
    return [q, k, v]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_rope(s: Shape, dtype: torch.dtype, interleaved: bool) -> None:
    """cos and sin of x's dtype or of f32, of a sequence or of all; v of qkv or apart; norms."""
    m, d = s.batch * s.positions, s.dim
    x = activations(m, (s.heads + 2 * s.kv_heads) * d, dtype=dtype)
    q_norm, k_norm = (activations(d, dtype=dtype, seed=seed) for seed in "qk")
    for apart, norms, angle_dtype, angle_rows in (
        (False, (None, None), dtype, s.positions),
        (True, (q_norm, k_norm), torch.float32, m),
        (True, (None, k_norm), dtype, m),
        (False, (q_norm, None), torch.float32, s.positions),
    ):
        qk_values = (s.heads + s.kv_heads) * d
        qkv = x[:, :qk_values] if apart else x
        angle = activations(angle_rows, s.rotated, seed="angle")
        cos, sin = angle.cos().to(angle_dtype), angle.sin().to(angle_dtype)
        buffers = {
            "x": memory_of(qkv, 5, 3),
            "x2": memory_of(x[:, qk_values:], 9, 1) if apart else None,
            "cos": cos if s.rotated else None,
            "sin": sin if s.rotated else None,
            "norm": norms[0],
            "norm2": norms[1],
        }
        q, k, v = run(
            s, buffers, {"x_stride": qkv.shape[1] + 5, "x2_stride": s.kv_heads * d + 9},
            angle_rows=angle_rows, v_apart=apart, interleaved=interleaved,
            q_norm=norms[0] is not None, k_norm=norms[1] is not None,
            float_angles=angle_dtype == torch.float32,
        )  # fmt: skip
        by_batch = (t.unflatten(0, (-1, s.positions)) for t in (cos, sin))
        turn = [*by_batch, interleaved]
        parts = x.split([s.heads * d, s.kv_heads * d, s.kv_heads * d], 1)
        for got, part, weight in zip((q, k), parts, norms, strict=False):
            head = heads_of(part, s)
            value = Value.of(head) if weight is None else normalized(head, weight, EPS, 1.0)
            check(got, rotated(value, *turn).store(dtype), f"{s} {apart}")
        assert torch.equal(v, heads_of(parts[2], s))

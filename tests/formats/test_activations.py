"""The specification of rounded activations: codes, scales, what it does at the ends of f32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from inputs import activations
from oracle import U

from torch_metalmm.formats.activations import BLOCK, TOP_CODES, dequantize, quantize, smallest

KINDS = pytest.mark.parametrize(("kind", "top_code"), TOP_CODES.items())


@KINDS
@given(
    hnp.arrays("float32", (3, 2 * BLOCK), elements=st.floats(-(2.0**126), 2.0**126, width=32)),
    st.sampled_from([1.0, 2.0**-60, 2.0**-120, 2.0**-149]),
)
def test_values_move_by_half_a_step(
    kind: str, top_code: int, values: object, factor: float
) -> None:
    """|x - code scale| <= scale / 2, but for roundings; where there is no scale, x is tiny."""
    x = torch.tensor(values) * factor
    codes, scales = quantize(x, kind)
    assert codes.dtype == getattr(torch, kind) and scales.dtype == torch.float32
    assert scales.shape == (3, 2) and int(codes.abs().max()) <= top_code
    step = scales.double().repeat_interleave(BLOCK, -1)
    # The scale errs by u, its reciprocal and the product by 3 u of up to that many steps.
    allowed = torch.where(step > 0, step * (0.5 + top_code * 4 * U), smallest(kind))
    assert bool(((x.double() - dequantize(codes, scales)).abs() <= allowed).all())


@KINDS
def test_the_largest_value_has_the_largest_code(kind: str, top_code: int) -> None:
    for sign in (-1, 1):
        for top in (1.0, 5e-34, 3.4e38, 0.1):
            x = torch.zeros(BLOCK)
            x[7] = sign * top
            codes, scales = quantize(x, kind)
            assert codes[7] == sign * top_code and int((codes != 0).sum()) == 1
            assert scales[0] == torch.tensor(top) / top_code


@KINDS
def test_ties_are_rounded_to_even(kind: str, top_code: int) -> None:
    x = torch.tensor([top_code, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5] + [0.0] * 25)
    assert quantize(x, kind)[0][:7].tolist() == [top_code, 0, 2, 2, 0, -2, -2]


@KINDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_block_nan(bad: float, kind: str, top_code: int) -> None:
    x = activations(2, 3 * BLOCK)
    x[1, BLOCK + 3] = bad
    codes, scales = quantize(x, kind)
    assert scales.isnan().tolist() == [[False] * 3, [False, True, False]]
    assert not codes[1, BLOCK : 2 * BLOCK].any()


@KINDS
def test_blocks_below_the_smallest_scale_are_zeros(kind: str, top_code: int) -> None:
    least = smallest(kind)
    below = torch.nextafter(torch.tensor(least), torch.tensor(0.0))
    for top, scale in ((least, 2.0**-126), (float(below), 0.0), (0.0, 0.0), (1e-45, 0.0)):
        codes, scales = quantize(torch.full((BLOCK,), top), kind)
        assert scales.tolist() == [scale] and codes.tolist() == [top_code if scale else 0] * BLOCK


def test_k_is_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"x: K = 33 is not a multiple of the block of 32"):
        quantize(torch.zeros(2, 33))

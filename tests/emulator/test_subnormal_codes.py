"""Codes as subnormal halves: taken where a product says that they are kept, and equal to the other
form where x has one value."""

from __future__ import annotations

import platform
from itertools import cycle

import pytest
import torch
from format_cases import HALF_FIELDS
from inputs import activations, generator, random_weight
from oracle import CODES, SUBNORMALS, Value, check, linear_apart, spec
from places import TESTS
from shaders import linear

from torch_metalmm import _C, formats
from torch_metalmm.msl.build import build_text
from torch_metalmm.msl.kernels import alone

N = 6
AFFINE = ("affine2_g32", "affine3_g64", "affine4_g64_f32", "affine8_g128_bf16")


def one_hot(k: int) -> torch.Tensor:
    at = torch.randperm(k, generator=generator("places"))[:32]
    return torch.eye(k)[at]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an option of x86-64's compiler")
@pytest.mark.parametrize("flushes", [True, False])
def test_a_gpu_that_flushes_halves_takes_the_other_form(flushes: bool) -> None:
    options = ("-mno-f16c", "-include", str(TESTS / "emulator/flushed_halves.h"))
    text, k = alone("gemv_q4_0_f32").text, 1024
    library = build_text(text, "kernel.metal", [], False, more=options if flushes else ())
    x, packed = one_hot(k), random_weight("q4_0", N, k)
    _C.load_emulated(str(library))
    assert _C.install_emulator() is not flushes
    try:
        y = torch.ops.metalmm.linear(x, packed, None, "q4_0", "gemv")
    finally:
        _C.remove_emulator()
    assert torch.equal(y, x @ spec("q4_0", packed, k).T)


def extreme_weight(name: str, k: int, largest: bool) -> torch.Tensor:
    """random_weight, every scale and minimum the largest or the least of its dtype."""
    packed, f = random_weight(name, N, k), formats.get(name)
    if isinstance(f, formats.Affine):
        info, groups = torch.finfo(f.dtype), (N, k // f.block_values)
        scale = info.max / 2**f.bits if largest else info.smallest_normal
        codes = packed[:, : k * f.bits // 8].contiguous().view(torch.uint32)
        return f.pack(codes, *(torch.full(groups, s).to(f.dtype) for s in (scale, -scale)))
    field = torch.tensor([65504.0 if largest else 2.0**-24]).half().view(torch.uint8)
    for at in HALF_FIELDS[name]:
        packed.view(N, -1, f.block_bytes)[..., at : at + 2] = field
    return packed


NAMES, KERNELS = (*SUBNORMALS, *CODES, *AFFINE), ("gemv", "gemv_batched")


# No other test runs the form of a GPU that flushes subnormals.
@pytest.mark.parametrize(
    ("name", "kernel", "keeps"),
    [
        *((name, kernel, False) for name in NAMES for kernel in KERNELS),
        *((name, kernel, True) for name, kernel in zip(NAMES, cycle(KERNELS), strict=False)),
    ],
)
def test_both_forms(name: str, kernel: str, keeps: bool) -> None:
    """One-hot rows give the weight; products are within the bound of the form."""
    k = 1536
    packed = random_weight(name, N, k)
    w, form = spec(name, packed, k), {"keeps_subnormals": keeps}
    x = one_hot(k)
    for weight in (packed, extreme_weight(name, k, True), extreme_weight(name, k, False)):
        y = linear(kernel, name, weight, x, gpu=form)
        assert torch.equal(y, x @ spec(name, weight, k).T)
    x = activations(5, k)
    want = linear_apart(x, name, packed)
    if not keeps and name in SUBNORMALS:
        want = Value.of(x).dot(w, k + 8).store(x.dtype)
    check(linear(kernel, name, packed, x, gpu=form), want, f"{name} {kernel} {keeps}")

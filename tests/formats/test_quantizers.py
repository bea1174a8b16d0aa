"""The native quantizers give the bytes of the Python specification."""

from __future__ import annotations

import pytest
import torch
from format_cases import KINDS, PACKED, READ, weights
from oracle import DTYPES
from torch import Tensor

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)
from torch_metalmm import formats
from torch_metalmm.formats import _base

pytestmark = pytest.mark.covering

N, K = 6, 1536  # six 256-blocks and twelve groups of 128: an odd number of SIMD registers of each


def quantize(w: Tensor, name: str) -> Tensor:
    return torch.ops.metalmm.quantize(w, name)


def edge_weights(kind: str) -> Tensor:
    """f32 [N, K] at the edges of f32 and of the rules: zeros' signs, ties of max, overflow."""
    g = torch.Generator().manual_seed(5)
    normal = torch.randn(N, K, generator=g)
    coin = torch.rand(N, K, generator=g) < 0.5

    def per_group(size: int, v: Tensor) -> Tensor:
        return v.repeat_interleave(size, 1)

    if kind == "signed zeros":
        return torch.where(coin, 0.0, -0.0)
    if kind == "zeros of one sign and positives":
        return torch.where(coin, normal.abs(), -0.0)
    if kind == "largest of both signs":
        return torch.where(coin, 0.5, -0.5)
    if kind == "empty groups":
        return normal * per_group(16, (torch.rand(N, K // 16, generator=g) < 0.5).float())
    if kind == "groups of unlike scale":
        return normal * per_group(16, torch.exp(8 * torch.randn(N, K // 16, generator=g)))
    if kind == "around powers of two":
        power = torch.exp2(torch.randint(-126, 127, (N, K // 32), generator=g).float())
        below = torch.randint(-100, 3, (N, K // 32), generator=g, dtype=torch.int32)
        near = (power.view(torch.int32) + below).view(torch.float32)
        return per_group(32, near) * normal.sign()
    if kind == "every exponent":
        bits = torch.randint(-(2**31), 2**31 - 1, (N, K), generator=g).to(torch.int32)
        v = bits.view(torch.float32)
        return torch.where(v.isfinite(), v, torch.tensor(1.0))
    return normal * {"sums overflow": 1e12, "range overflows": 8e37, "subnormal": 1e-40}[kind]


EDGES = (
    *("signed zeros", "zeros of one sign and positives", "largest of both signs"),
    *("empty groups", "groups of unlike scale", "around powers of two"),
    *("every exponent", "sums overflow", "range overflows", "subnormal"),
)


def all_weights() -> dict[str, Tensor]:
    cases = {kind: weights(kind, N, K) for kind in KINDS}
    return cases | {kind: edge_weights(kind) for kind in EDGES}


WEIGHTS = all_weights()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_bytes_equal_specification(name: str, dtype: torch.dtype) -> None:
    """Every format, source dtype and kind of weights, byte for byte."""
    spec = formats.get(name)
    for kind, w in WEIGHTS.items():
        w = w.to(dtype)
        w = torch.where(w.isfinite(), w, torch.tensor(-1.0, dtype=dtype))  # overflow of f16
        packed = quantize(w, name)
        assert packed.dtype == torch.uint8 and packed.is_contiguous()
        assert torch.equal(packed, spec.quantize(w)), kind


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dense_rounding_of_every_exponent(dtype: torch.dtype) -> None:
    """f32 to f16 and bf16: every sign and exponent, 7 high bits, at and beside rounding ties."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    low = [t + d for t in (0, 0x1000, 0x2000, 0x3000, 0x8000, 0xF000) for d in (-1, 0, 1)]
    x = (high + torch.tensor(low, dtype=torch.int32)).view(torch.float32)
    x = torch.where(x.isfinite(), x, torch.tensor(0.0))
    packed = quantize(x, {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype])
    assert torch.equal(packed, x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("name", PACKED)
def test_rows_and_threads_are_independent(name: str) -> None:
    """A row's bytes depend neither on the other rows, of which there may be none, nor on the number
    of threads."""
    w = weights("outliers", 67, 256)
    whole = quantize(w, name)
    torch.set_num_threads(3)
    assert torch.equal(quantize(w, name), whole)
    assert torch.equal(torch.cat([quantize(w[i : i + 1], name) for i in range(67)]), whole)
    assert quantize(w[:0], name).shape == (0, whole.shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["f16", "q4_0", "q4_k", "iq4_nl", "affine3_g32"])
def test_strided_and_offset_source(name: str, dtype: torch.dtype) -> None:
    """Transposed, strided and oddly placed sources, and one that requires grad."""
    w = weights("normal", 5, 256).to(dtype)
    expected = quantize(w, name)
    wide = torch.full((5, 515), float("nan"), dtype=dtype)
    wide[:, 1:513:2] = w
    shifted = torch.full((5 * 256 + 3,), float("nan"), dtype=dtype)
    shifted[3:] = w.flatten()
    for source in (w.t().contiguous().t(), wide[:, 1:513:2], shifted[3:].view(5, 256)):
        assert torch.equal(quantize(source, name), expected)
    packed = quantize(w.clone().requires_grad_(), name)
    assert torch.equal(packed, expected) and not packed.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", PACKED)
def test_not_finite_names_the_row(name: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row with NaN or Inf is named, by the op and by the specification, which takes two
    rows at a time."""
    monkeypatch.setattr(_base, "VALUES_AT_A_TIME", 512)
    w = weights("normal", 8, 256)
    w[3, 250] = w[6, 0] = bad
    with pytest.raises(ValueError, match=r"\bw\b.*row 3|row 3 of w"):
        quantize(w, name)
    with pytest.raises(ValueError, match=f"{name}: row 3 of w has NaN or Inf"):
        formats.get(name).quantize(w)


@pytest.mark.parametrize("name", READ)
def test_a_format_that_is_only_read(name: str) -> None:
    """Refused before anything is computed, also for a weight of no rows and on fake tensors."""
    for w in (torch.zeros(2, 256), torch.zeros(0, 256), torch.zeros(2, 256, device="meta")):
        with pytest.raises(ValueError, match=f"format: {name} is only read.*importance matrix"):
            quantize(w, name)
    message = f"{name} is only read here: .* importance matrix, and no quantizer of this package"
    with pytest.raises(ValueError, match=message):
        formats.get(name).quantize(weights("normal", 1, 256))

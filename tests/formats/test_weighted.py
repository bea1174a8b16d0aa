"""Quantizers that are given the importance of columns: the specification, and the native ones."""

from __future__ import annotations

import pytest
import torch
from format_cases import (
    AFFINE,
    KINDS,
    PACKED,
    weights,
)
from oracle import DTYPES
from test_quantizers import EDGES, edge_weights
from torch import Tensor

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)
from torch_metalmm import formats

N, K = 3, 1536  # twelve groups of 128: eight lanes and four
WEIGHED = [n for n in PACKED if formats.get(n).weighs]
# Of the affine formats a third, in which each two of bits, group and dtype occur together.
COMPARED = [n for n in WEIGHED if n not in AFFINE] + [
    f"affine{bits}_g{group}{suffix}"
    for b, bits in enumerate((2, 3, 4, 5, 6, 8))
    for g, group in enumerate((32, 64, 128))
    for suffix in [("", "_bf16", "_f32")[(b + g) % 3]]
]
ROUNDED = [n for n in PACKED if n not in WEIGHED]


def quantize(w: Tensor, name: str, importance: Tensor | None) -> Tensor:
    return torch.ops.metalmm.quantize(w, name, importance)


def importances() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    skewed = torch.exp(2 * torch.randn(K, generator=g))
    return {
        "skewed": skewed,
        "equal": torch.ones(K),
        "zeros": torch.zeros(K),
        "groups of zeros": skewed * (torch.rand(K // 16, generator=g) < 0.5).repeat_interleave(16),
        "every exponent": torch.exp2(torch.randint(-149, 128, (K,), generator=g).float()),
        "subnormal": skewed * 1e-41,
    }


IMPORTANCES = importances()


def equal_bytes(name: str, w: Tensor, importance: Tensor) -> bool:
    return torch.equal(quantize(w, name, importance), formats.get(name).quantize(w, importance))


@pytest.mark.parametrize("name", COMPARED)
def test_bytes_equal_specification_for_every_kind_of_weights(name: str) -> None:
    """In one tensor, three rows of each: the specification takes a second for a tensor."""
    kinds = [weights(kind, N, K) for kind in KINDS] + [edge_weights(kind)[:N] for kind in EDGES]
    assert equal_bytes(name, torch.cat(kinds), IMPORTANCES["skewed"])


@pytest.mark.parametrize("name", COMPARED)
def test_bytes_equal_specification_for_every_importance(name: str) -> None:
    w = torch.cat([weights("normal", N, K), edge_weights("empty groups")[:N]])
    assert equal_bytes(name, w, IMPORTANCES["every exponent"])
    assert equal_bytes(name, w[:, :512], IMPORTANCES["zeros"][:512])
    others = [IMPORTANCES[kind][:512] for kind in ("equal", "groups of zeros", "skewed")]
    assert equal_bytes(name, w, torch.cat(others))
    assert equal_bytes(name, w[:, :256], IMPORTANCES["subnormal"][:256])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["q4_1", "q3_k", "iq4_xs", "affine4_g32_bf16"])
def test_sources_and_strides(name: str, dtype: torch.dtype) -> None:
    """Other dtypes, a strided importance that requires grad, and K of a few blocks."""
    w, importance = weights("normal", 3, 256).to(dtype), IMPORTANCES["skewed"][:256]
    wide = torch.full((512,), float("nan"))
    wide[::2] = importance
    packed = quantize(w, name, wide.requires_grad_()[::2])
    assert not packed.requires_grad
    assert torch.equal(packed, formats.get(name).quantize(w, importance))


@pytest.mark.parametrize("name", WEIGHED)
def test_the_weighted_error_is_smaller(name: str) -> None:
    """In f64, against the bytes without an importance."""
    w, importance = weights("normal", 8, 1024), IMPORTANCES["skewed"][:1024]
    f = formats.get(name)

    def cost(packed: Tensor) -> float:
        error = f.dequantize(packed, 1024).double() - w.double()
        return float((error.square() * importance.double()).sum())

    assert cost(quantize(w, name, importance)) < cost(quantize(w, name, None))


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_formats_do_not_read_it(name: str) -> None:
    w = weights("normal", 4, 512)
    importance = IMPORTANCES["every exponent"][:512]
    assert torch.equal(quantize(w, name, importance), quantize(w, name, None))
    assert torch.equal(formats.get(name).quantize(w, importance), formats.get(name).quantize(w))


@pytest.mark.parametrize("name", WEIGHED)
def test_only_proportions_count(name: str) -> None:
    """Powers of two, as far as f32 reaches; all 0 is all 1."""
    w, importance = weights("outliers", 4, 1024), IMPORTANCES["skewed"][:1024]
    packed = quantize(w, name, importance)
    for factor in (2.0**-100, 2.0**110):
        assert torch.equal(quantize(w, name, importance * factor), packed)
    zeros = torch.zeros(1024)
    assert torch.equal(quantize(w, name, zeros), quantize(w, name, torch.ones(1024)))


@pytest.mark.parametrize("name", WEIGHED)
def test_columns_of_no_importance_decode_to_numbers(name: str) -> None:
    """Half of the groups cost nothing, and still have codes; no scale is NaN or infinite."""
    w = weights("normal", 4, 1024)
    importance = (torch.arange(1024) // 128 % 2).float()
    f = formats.get(name)
    back = f.dequantize(quantize(w, name, importance), 1024)
    free = importance == 0
    assert back.isfinite().all()
    # Zeros would cost more than what the codes decode to.
    assert (back - w)[:, free].square().sum() < w[:, free].square().sum()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_elements_that_are_no_importance(bad: float) -> None:
    w, importance = weights("normal", 2, 256), torch.ones(256)
    importance[7] = bad
    for name in ("q4_k", "q8_0", "affine4_g64"):
        with pytest.raises(ValueError, match="importance: element 7 is negative, NaN or Inf"):
            quantize(w, name, importance)
        with pytest.raises(ValueError, match="importance has an element that is negative"):
            formats.get(name).quantize(w, importance)


@pytest.mark.parametrize(
    "importance",
    [torch.ones(255), torch.ones(1, 256), torch.ones(256).double(), torch.ones(256).int()],
    ids=["255", "2-D", "f64", "int"],
)
def test_shapes_and_dtypes(importance: Tensor) -> None:
    w = weights("normal", 2, 256)
    for device in ("cpu", "meta"):
        with pytest.raises(
            (ValueError, RuntimeError), match=r"importance: .*must be float32 \[K\]"
        ):
            quantize(w.to(device), "q4_0", importance.to(device))
    with pytest.raises(ValueError, match=r"importance must be float32 \[256\]"):
        formats.get("q4_0").quantize(w, importance)


def test_no_rows_no_columns_and_fake_tensors() -> None:
    for name in ("q4_0", "q5_k", "affine3_g32"):
        size = formats.get(name).row_bytes(256)
        assert quantize(torch.empty(0, 256), name, torch.ones(256)).shape == (0, size)
        assert quantize(torch.empty(3, 0), name, torch.ones(0)).shape == (3, 0)
        assert formats.get(name).quantize(torch.empty(3, 0), torch.ones(0)).shape == (3, 0)
        fake = quantize(torch.empty(3, 256, device="meta"), name, torch.ones(256, device="meta"))
        assert fake.shape == (3, size) and fake.dtype == torch.uint8

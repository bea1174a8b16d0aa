"""Where equality is a theorem: decoded weights bit for bit, one-hot activations, integer grids."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from inputs import generator, integer_weight, long_k, random_weight
from oracle import DTYPES, FORMATS, flushed, flushed_spec, spec, y64

from torch_metalmm import formats

pytestmark = [pytest.mark.quick, pytest.mark.isa, pytest.mark.schedules]

N = 13  # more than a tile of 12 rows, and no multiple of the rows of a pass

ops = torch.ops.metalmm


def any_bytes(name: str, n: int, k: int) -> torch.Tensor:
    """Every byte random: also scales that are NaN, infinite or subnormal."""
    size = formats.get(name).row_bytes(k)
    return torch.randint(0, 256, (n, size), generator=generator("any", name), dtype=torch.uint8)


def are_bits_of(got: torch.Tensor, *allowed: torch.Tensor) -> bool:
    """Whether each f32 element has the bits of one of `allowed` there; any NaN equals any."""
    bits = got.view(torch.int32)
    equal = [(bits == a.view(torch.int32)) | (got.isnan() & a.isnan()) for a in allowed]
    return bool(torch.stack(equal).any(0).all())


@pytest.mark.every_format
def test_decoding_is_the_specification(name: str, backend: Backend) -> None:
    """dequantize and embedding give the specification's bits, rounded once to each dtype.

    Where the engine flushes subnormals, an element may be that of flushed_spec().
    """
    k, turn = long_k(name), FORMATS.index(name)
    for packed in (any_bytes(name, 64, k), random_weight(name, 16, k)):
        w, want, n = backend.put(packed), spec(name, packed, k), len(packed)
        allowed = [want, flushed_spec(name, packed, k)] if backend.flushes else [want]
        ids = torch.randint(0, n, (3, 5), generator=generator("ids"))
        for i, dtype in enumerate(DTYPES, turn + n):
            rounded = [a.to(dtype).float() for a in allowed]
            got = ops.dequantize(w, name, k, dtype=dtype).cpu()
            rows = ops.embedding(backend.put(ids), w, name, k, dtype=dtype).cpu()
            assert got.dtype == rows.dtype == dtype
            assert are_bits_of(got.float(), *rounded), (name, dtype)
            assert are_bits_of(rows.float(), *(r[ids] for r in rounded)), (name, dtype)
            # In turn: a value of the dtype, one of f32, one for each row.
            scale = (torch.tensor(11.3), torch.tensor([0.37]), torch.linspace(-3, 3, n))[i % 3]
            scale = scale.to(torch.float32 if i % 3 == 1 else dtype)
            put = backend.put(ids), w, name, k
            scaled = ops.embedding(*put, dtype=dtype, scale=backend.put(scale)).cpu()
            factors = (scale[ids][..., None] if scale.numel() > 1 else scale).float()
            product = rows.float() * factors
            # A product of a GPU may take and give zeros for subnormals.
            of = [product, flushed(product), flushed(flushed(rows.float()) * factors)]
            near = [p.to(dtype).float() for p in of]
            assert are_bits_of(scaled.float(), *near), (name, dtype, scale)


def sampled(name: str, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Places in a row: with the other dtypes each of a block, in one block or another, and more."""
    span = max(64, formats.get(name).block_values)
    each = {span * (i % (k // span)) + i for i in range(span)}
    places = sorted({*each, *range(0, k, 37), *range(k - 8, k)})
    return torch.tensor(places[DTYPES.index(dtype) :: len(DTYPES)])


@pytest.mark.every_pipeline
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_hot_gives_the_weight(
    name: str, dtype: torch.dtype, backend: Backend, strategy: str | None
) -> None:
    """x = I gives Wᵀ, every value of it rounded once to the dtype of x."""
    k = long_k(name)
    packed = random_weight(name, N, k)
    places = sampled(name, k, dtype) if backend.is_slow else torch.arange(k)
    x = backend.put(torch.eye(k, dtype=dtype)[places])
    y = ops.linear(x, backend.put(packed), None, name, strategy).cpu()
    want = spec(name, packed, k).T[places].to(dtype)
    assert want.isfinite().all()
    wrong = (y != want).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} values differ, the first at [i, n] = {wrong[0].tolist()}"


@pytest.mark.formats
def test_sums_of_integers_are_exact(name: str, backend: Backend, strategy: str | None) -> None:
    """On integer grids no sum rounds, in any order: every term is counted, and once.

    A slow engine takes one dtype, and every second M.
    """
    k, turn = backend.k(name), FORMATS.index(name) % 2 if backend.is_slow else None
    packed = integer_weight(name, N, k)
    values = spec(name, packed, k)
    assert torch.equal((2 * values).round(), 2 * values)
    assert values.abs().max() * 4 * k < 2**23  # twice the largest sum is an exact f32
    w = backend.put(packed)
    dtypes = (backend.dtype(name, strategy),) if backend.is_slow else DTYPES
    for m in (1, 2, 3, 4, 5, 7, 8, 11, 40)[turn :: 1 if turn is None else 2]:
        x = torch.randint(-4, 5, (m, k), generator=generator("grid", m)).float()
        want = y64(x, values)
        for dtype in dtypes:
            y = ops.linear(backend.put(x.to(dtype)), w, None, name, strategy).cpu()
            assert torch.equal(y, want.float().to(dtype)), (m, dtype)

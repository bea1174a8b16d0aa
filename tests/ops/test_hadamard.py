"""hadamard against float64, and a cache whose rows are of what hadamard makes of the values."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from cache_cases import layer
from inputs import activations
from oracle import DTYPES, Value, check
from torch import Tensor

from torch_metalmm import formats

ops = torch.ops.metalmm
SIZE = 32


def matrix() -> Tensor:
    """Sylvester's of 32 over sqrt(32): entry (i, j) is -1 to the power of the bits of i & j."""
    entries = [[1 - 2 * ((i & j).bit_count() & 1) for j in range(SIZE)] for i in range(SIZE)]
    return torch.tensor(entries, dtype=torch.float64) / SIZE**0.5


def rotated(x: Tensor) -> Value:
    """Five sums, a product and the rounding of its factor."""
    blocks = Value.of(x.reshape(-1, SIZE)).dot(matrix(), 7)
    return Value(blocks.exact.view(x.shape), blocks.error.view(x.shape))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype: torch.dtype, backend: Backend) -> None:
    """Rows apart, a tail of a threadgroup, no rows, an outlier in each block."""
    x = activations(3, 7, 5, 96, dtype=dtype)
    x[..., ::SIZE] = 1000.0
    for given in (x, x.transpose(0, 2), x[:, :0], x[0, 0, 0], x[..., 32:64]):
        y = ops.hadamard(backend.put_view(given))
        assert y.dtype == dtype and y.is_contiguous() and y.shape == given.shape
        check(y, rotated(given).store(dtype), str(given.stride()))


def test_bits_are_those_of_the_cpu(backend: Backend) -> None:
    """So that all engines pack the same rows."""
    x = activations(40, 320)
    assert torch.equal(ops.hadamard(backend.put(x)).cpu(), ops.hadamard(x))


def test_the_gradient_is_the_transpose(backend: Backend) -> None:
    x, g = (backend.put(activations(2, 64, seed=seed)) for seed in "xg")
    x.requires_grad_()
    ops.hadamard(x).backward(g)
    check(x.grad, rotated(g.cpu()).store(torch.float32))


# ---- rows of a cache


NAMES = (
    ("q8_0_rotated", "q8_0_rotated"),
    ("q4_0_rotated", "q4_0_rotated"),
    ("affine4_g64_rotated", "affine4_g64_rotated"),
    ("f16", "q4_0_rotated"),
    ("q4_0", "q4_0_rotated"),
    ("q8_0_rotated", "q5_1"),
)


def plain(names: tuple[str, str]) -> tuple[str, ...]:
    return tuple(n.removesuffix("_rotated") for n in names)


def where(name: str, t: Tensor) -> Tensor:
    out: Tensor = ops.hadamard(t) if name.endswith("_rotated") else t
    return out


@pytest.mark.parametrize("names", NAMES, ids="/".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_packed_of_rotated_values(
    names: tuple[str, str], dtype: torch.dtype, backend: Backend
) -> None:
    """By cache_append and by rope_append: v as it is, k turned by angles of 0."""
    k, v = (activations(2, 3, 4, 64, dtype=dtype, seed=seed) for seed in "kv")
    row = [formats.get(n).row_bytes(64) // (2 if n == "f16" else 1) for n in plain(names)]
    empty = [torch.zeros(2, 3, 9, r, dtype=torch.uint8) for r in row]
    empty = [e.half() if n == "f16" else e for n, e in zip(names, empty, strict=True)]
    slots = backend.put(torch.tensor([7, 0, 3, 5]))
    want, got, roped = ([backend.put(e.clone()) for e in empty] for _ in range(3))
    put = [where(n, backend.put(t.float())) for n, t in zip(names, (k, v), strict=True)]
    ops.cache_append(*want, *put, slots, *plain(names))
    ops.cache_append(*got, backend.put(k), backend.put(v), slots, *names)
    qkv = torch.cat([t.transpose(1, 2).flatten(2) for t in (k, k, v)], -1)
    no_angle = torch.ones(1, 4, 64), torch.zeros(1, 4, 64)
    given = (backend.put(t) for t in (qkv, *no_angle))
    q = ops.rope_append(*given, 3, 3, *roped, slots, *names)
    assert torch.equal(q.cpu(), k)  # attention rotates it, rope_append does not
    for wanted, *others in zip(want, got, roped, strict=True):
        assert wanted.any()
        assert all(torch.equal(wanted, other) for other in others), names


@pytest.mark.parametrize("names", NAMES, ids="/".join)
def test_attention_rotates_q_and_its_result(names: tuple[str, str], backend: Backend) -> None:
    """Over the same rows, in every way of computing it, with pages and without."""
    cache = layer((1, 2, 128, 64), 128, plain(names))  # type: ignore[arg-type]
    keys, values = backend.put(cache.keys), backend.put(cache.values)
    length = backend.put(torch.tensor(70))
    pages = {"pages": backend.put(torch.tensor([[1, 0]]))}
    turn = NAMES.index(names)  # of the dtypes, for each of which a GPU has kernels
    for i, queries in enumerate((1, 3, 20)):
        dtype = DTYPES[(turn + i) % len(DTYPES)]
        q = backend.put(activations(1, 4, queries, 64, dtype=dtype, seed="q"))
        given = (keys, values, *names), (keys, values, *plain(names))
        for at, more in ((length, {}), (length, {"strategy": "torch"}), (length[None], pages)):
            y = ops.attention(q, *given[0], at, **more)
            want = ops.attention(where(names[0], q), *given[1], at, **more)
            assert torch.equal(y, where(names[1], want)), (dtype, queries, more)


@pytest.mark.parametrize("name", ["f16_rotated", "q4_0_rotated_rotated", "_rotated"])
def test_formats_that_are_not_rotated(name: str, backend: Backend) -> None:
    rows = backend.put(torch.zeros(1, 1, 4, 36, dtype=torch.uint8))
    k, slots = backend.put(torch.zeros(1, 1, 1, 64)), backend.put(torch.tensor([0]))
    with pytest.raises(ValueError, match="format: "):
        ops.cache_append(rows, rows.clone(), k, k, slots, name, "q4_0")

"""cache_append: the bytes of the quantizer, in place, at the slots."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from backends import Backend
from cache_cases import CACHE_FORMATS, as_stored, pack, unwritten
from inputs import activations, generator
from oracle import DTYPES
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_metalmm import formats

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules


stored = partial(unwritten, byte=17)


def hard_rows(*shape: int) -> Tensor:
    """Normal rows, and blocks of equals, of zeros of both signs, of tiny and of large numbers."""
    x = activations(*shape, seed="rows")
    flat = x.view(-1, 32)
    flat[0] = 0
    flat[1] = -0.0
    flat[2] = 1.5
    flat[3] = torch.where(torch.arange(32) % 2 == 0, 3.0, -3.0)
    flat[4] *= 1e-20
    flat[5] *= 1e4
    flat[6] = torch.arange(32) - 127.5
    flat[7] = 2.0**-140
    return x


@pytest.mark.quick
@pytest.mark.every_format
def test_rows_are_those_of_the_specification(name: str, backend: Backend) -> None:
    block = formats.get(name).block_values
    dim = 64 if block <= 64 else block
    k = hard_rows(2, 3, 5, dim)
    if formats.get(name).block_values == 1:
        k = k.clamp(-6e4, 6e4)
    v = k.flip(0)
    slots = torch.tensor([8, 0, 3, 1, 10])
    keys, values = (backend.put(stored(name, 2, 3, 11, dim)) for _ in range(2))
    memory = keys.data_ptr(), values.data_ptr()
    put = backend.put
    if not formats.get(name).packs:
        with pytest.raises(ValueError, match=f"format_k: {name} is only read here"):
            ops.cache_append(keys, values, put(k), put(v), put(slots), name, name)
        return
    assert ops.cache_append(keys, values, put(k), put(v), put(slots), name, name) is None
    assert (keys.data_ptr(), values.data_ptr()) == memory
    for got, rows in ((keys, k), (values, v)):
        want = stored(name, 2, 3, 11, dim)
        # A shader that flushes quantizes zeros where the CPU finds codes, of a scale that is 0.
        few = rows.abs() < 2.0**-126 if backend.flushes else torch.zeros(1, dtype=torch.bool)
        allowed = [
            want.clone().index_copy_(2, slots, as_stored(name, pack(name, r)))
            for r in (torch.where(few, rows * 0, rows), rows)
        ]
        want = allowed[0]
        if backend.flushes and name in ("f32", "bf16"):
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=2.0**-126)
        else:
            assert any(torch.equal(got.cpu(), each) for each in allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_rows_of_every_dtype(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Random blocks by the thousand; k and v in two formats, heads of k behind positions."""
    k = (torch.randn(2, 40, 3, 128, generator=generator("k", name)) * 4).to(dtype).transpose(1, 2)
    keys, values = stored(name, 2, 3, 40, 128), stored("q8_0", 2, 3, 40, 128)
    keys, values = backend.put(keys), backend.put(values)
    slots = backend.put(torch.arange(40))
    ops.cache_append(
        keys, values, backend.put_view(k), backend.put(k.contiguous()), slots, name, "q8_0"
    )
    assert torch.equal(keys.cpu(), as_stored(name, pack(name, k)))
    assert torch.equal(values.cpu(), pack("q8_0", k))


def test_a_view_of_a_larger_cache(backend: Backend) -> None:
    whole = backend.put(stored("q4_0", 2, 4, 12, 64))
    before = whole.clone()
    part = whole[:, ::2, 2:9]
    alone = part.contiguous()  # values whose strides are not those of the keys
    k = activations(2, 2, 2, 64)
    slots = torch.tensor([4, 0])
    put = backend.put
    rows, at = put(k), put(slots)
    ops.cache_append(part, part, rows, rows, at, "q4_0", "q4_0")
    whole.copy_(before)
    ops.cache_append(part, alone, rows, rows, at, "q4_0", "q4_0")
    assert torch.equal(alone, part)
    before[:, ::2, 2:9][:, :, slots.to(before.device)] = put(pack("q4_0", k))
    assert torch.equal(whole, before)


def test_what_is_refused(backend: Backend) -> None:
    """Nothing is written by a call that fails."""
    keys, values = (backend.put(stored("q8_0", 1, 2, 8, 64)) for _ in range(2))
    before = keys.clone()
    k, slots = backend.put(activations(1, 2, 3, 64)), backend.put(torch.arange(3))
    good = (keys, values, k, k, slots, "q8_0", "q8_0")
    with pytest.raises(ValueError, match="requires grad"):
        ops.cache_append(keys, values, k.clone().requires_grad_(), k, slots, "q8_0", "q8_0")
    for v, at in ((k[:, :1], slots), (k, slots[:2])):
        with pytest.raises(ValueError):
            ops.cache_append(keys, values, k, v, at, "q8_0", "q8_0")
    if backend.device == "cpu":
        with pytest.raises(IndexError):
            ops.cache_append(*good[:4], slots + 6, "q8_0", "q8_0")
    if backend.name == "cpu":
        for number in (torch.nan, torch.inf):
            v = k.clone()
            v[0, 1, 2, 5] = number
            with pytest.raises(ValueError, match="v: has NaN or Inf, which q8_0 cannot hold"):
                ops.cache_append(*good[:3], v, slots, "q8_0", "q8_0")
        dense = torch.zeros(*keys.shape[:3], k.shape[-1], dtype=torch.float16)
        for large in (65519.0, -65520.0, 1e5, torch.inf):
            v = k.float().clone()
            v[0, 1, 2, 5] = large
            if large in (-65520.0, 1e5):
                with pytest.raises(ValueError, match=f"v: has {large:g}, which f16 cannot hold"):
                    ops.cache_append(dense, dense.clone(), k, v, slots, "f16", "f16")
            else:
                ops.cache_append(dense, dense.clone(), k, v, slots, "f16", "f16")
    assert torch.equal(keys, before) and torch.equal(values, before)


def test_memory_that_is_shared(backend: Backend) -> None:
    """No element is written twice, nor written and read: refused before anything is written."""
    memory = backend.put(stored("f32", 2, 4, 12, 64))
    rows, other = memory[:, :2], memory[:, 2:]
    k = backend.put(activations(2, 2, 3, 64))
    slots = backend.put(torch.arange(3))
    before = memory.clone()
    wide = rows[:1].expand(2, -1, -1, -1)
    ids = memory.view(torch.int64)[0, 0, 0, :3]
    in_between = memory.as_strided((2, 2, 12, 64), (3072, 1536, 65, 1), 7)
    bad: dict[str, tuple[tuple[Tensor, ...], str]] = {
        "expanded": (
            (wide, other, k, k, slots),
            "keys: shape.*own place",
        ),
        "steps": (
            (rows, other.as_strided((2, 2, 12, 64), (3072, 768, 32, 1)), k, k, slots),
            "values: shape.*own place",
        ),
        "one memory": ((rows, rows, k, k.clone(), slots), "values: share memory with keys"),
        "in part": ((memory[:, 1:3], rows, k, k, slots), "values: share memory with keys"),
        "other strides": ((rows, in_between, k, k, slots), "values: share memory with keys"),
        "k of keys": (
            (rows, other, rows[:, :, 5:8], k, slots),
            "k: shares memory with keys",
        ),
        "v of keys": (
            (rows, other, k, rows[:, :, :3], slots),
            "v: shares memory with keys",
        ),
        "k of values": ((rows, other, other[:, :, :3], k, slots), "k: shares memory with values"),
        "slots": ((rows, other, k, k, ids), "slots: .* with keys, which is written"),
    }
    for label, (tensors, message) in bad.items():
        with pytest.raises(ValueError, match=message):
            ops.cache_append(*tensors, "f32", "f32")
        assert torch.equal(memory, before), label


def test_memory_that_is_not_shared(backend: Backend) -> None:
    """Keys and values in one storage, in any order; and k in that of the cache, in other slots."""
    k = backend.put(activations(3, 5, 3, 64))
    slots = backend.put(torch.arange(3))
    for shape, dim in (
        ((2, 3, 5, 9, 64), 0),
        ((3, 2, 5, 9, 64), 1),
        ((3, 5, 2, 9, 64), 2),
        ((3, 5, 9, 2, 64), 3),
        ((3, 9, 2, 5, 64), 2),
    ):
        keys, values = backend.put(torch.zeros(shape)).unbind(dim)
        if shape[1] == 9:  # heads behind slots
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        values[:, :, 6:] = k
        ops.cache_append(keys[:, :, :6], values[:, :, :6], k, values[:, :, 6:], slots, "f32", "f32")
        assert torch.equal(keys[:, :, :3], k) and torch.equal(values[:, :, :3], k)
        assert not keys[:, :, 3:].any() and not values[:, :, 3:6].any()


def test_a_row_with_nan_decodes_to_no_number(backend: Backend) -> None:
    """On a device, where an error would wait: the block is lost, not the rest."""
    if not backend.chip():
        pytest.skip("an error on the CPU")
    for name in ("q8_0", "q4_0"):
        for number in (torch.nan, torch.inf, -torch.inf):
            k = activations(1, 1, 1, 64)
            k[0, 0, 0, 5] = number
            rows = backend.put(stored(name, 1, 1, 1, 64))
            k = backend.put(k)
            ops.cache_append(rows, rows.clone(), k, k, backend.put(torch.arange(1)), name, name)
            decoded = formats.get(name).dequantize(rows.cpu().view(1, -1), 64)
            assert not decoded[0, :32].isfinite().any() and decoded[0, 32:].isfinite().all()


@pytest.mark.parametrize("name", ["f16", "q8_0"])
def test_a_compiled_step(name: str, backend: Backend) -> None:
    """A write and attention in one graph for all tokens: slots and length are tensors."""
    keys, values = (backend.put(stored(name, 1, 2, 8, 64)) for _ in range(2))
    eager = keys.clone(), values.clone()
    counter = CompileCounterWithBackend("aot_eager")

    def step(keys: Tensor, values: Tensor, x: Tensor, slot: Tensor) -> Tensor:
        ops.cache_append(keys, values, x[:, :2], x[:, 2:4], slot, name, name)
        y: Tensor = ops.attention(x[:, 4:], keys, values, name, name, slot[0] + 1)
        return y

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    with torch.no_grad():
        for i in range(4):
            x = backend.put(activations(1, 8, 1, 64, seed=i))
            slot = backend.put(torch.tensor([i]))
            want = step(*eager, x, slot)
            assert torch.equal(compiled(keys, values, x, slot), want)
    assert counter.frame_count == 1
    assert torch.equal(keys, eager[0]) and torch.equal(values, eager[1])


def test_views_that_are_negated_or_conjugate() -> None:
    """Of every op without a result: torch's fallback for such views takes the first of them."""
    assert ops_without_results() == {"cache_append", "_cache_append_shape", "_exact_rows"}
    k = torch.randn(1, 2, 3, 64)
    negated = torch._neg_view(-k)
    slots = torch.arange(3)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            keys, values = torch.zeros(1, 2, 4, 64), torch.zeros(1, 2, 4, 64)
            ops.cache_append(keys, values, negated, k.clone(), slots, "f32", "f32")
            assert torch.equal(keys[:, :, :3], k) and torch.equal(values, keys)
            ops._cache_append_shape(keys, values, negated, k, slots, "f32", "f32")
            with pytest.raises(ValueError, match="keys: a negated or conjugate view"):
                ops.cache_append(torch._neg_view(keys), values, k, k, slots, "f32", "f32")
            with pytest.raises(ValueError, match="k: "):
                ops.cache_append(keys, values, k.to(torch.cfloat).conj(), k, slots, "f32", "f32")


def ops_without_results() -> set[str]:
    schemas = torch._C._jit_get_all_schemas()
    return {s.name[9:] for s in schemas if s.name.startswith("metalmm::") and not s.returns}

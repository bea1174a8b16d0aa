"""PackedCache layer by layer, beside DynamicCache: what each call leaves, and where."""

from __future__ import annotations

import copy
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_cases import pack, unpack
from inputs import activations
from tiny_models import tiny_llama
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from bench.models.op_counts import Calls
from torch_metalmm import PackedCache, formats
from torch_metalmm.hf.caches.layers import FIRST, SLACK, STEP, PackedLayer, PackedSlidingLayer
from torch_metalmm.hf.caches.slots import PackedEntries

HEADS, DIM = 2, 64
FORMATS = (None, "f32", "f16", "q8_0", "q4_0", "q4_0_rotated")


def rows(batch: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values that f16 holds."""
    k, v = (activations(batch, HEADS, count, DIM, seed=(seed, i)) for i in (0, 1))
    return k.half().float(), v.half().float()


def as_kept(format: str | None, t: Tensor) -> Tensor:
    if format in (None, "f32", "f16"):
        return t
    if format == "q4_0_rotated":
        kept: Tensor = torch.ops.metalmm.hadamard(as_kept("q4_0", torch.ops.metalmm.hadamard(t)))
        return kept
    return unpack(format, pack(format, t), DIM)


def both(
    ours: Any, theirs: Any, format: str | None, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What the two layers return for new rows; theirs is given what the format keeps of them."""
    return ours.update(k, v), theirs.update(as_kept(format, k), as_kept(format, v))


def assert_same(ours: Any, theirs: Any, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert ours.get_seq_length() == theirs.get_seq_length()
    for queries in (1, 3, 20):
        assert ours.get_mask_sizes(queries) == theirs.get_mask_sizes(queries), queries


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_a_full_layer_is_dynamic_layer(format: str | None, seed: int) -> None:
    """After any calls, in any order."""
    r = random.Random(seed)
    ours, theirs, batch = PackedLayer(format), DynamicLayer(), 2
    for step in range(25):
        k, v = rows(batch, r.choice((1, 1, 2, 30, 200)), step)
        assert_same(ours, theirs, *both(ours, theirs, format, k, v))
        act = r.choice(("", "", "", "crop", "reorder", "repeat", "select", "reset", "offload"))
        if act == "crop":
            count = -r.choice((0, 1, 5, 10_000))
            for layer in (ours, theirs):
                layer.crop(count)
        elif act == "reorder":
            order = torch.tensor([r.randrange(batch) for _ in range(batch)])
            for layer in (ours, theirs):
                layer.reorder_cache(order)
        elif act == "repeat" and batch < 8:
            batch *= 2
            for layer in (ours, theirs):
                layer.batch_repeat_interleave(2)
        elif act == "select":
            kept = torch.tensor(sorted(r.sample(range(batch), max(1, batch // 2))))
            batch = len(kept)
            for layer in (ours, theirs):
                layer.batch_select_indices(kept)
        elif act == "reset":
            batch = r.choice((1, 2))
            for layer in (ours, theirs):
                layer.reset()
        elif act == "offload":
            for layer in (ours, theirs):
                layer.offload()
                layer.prefetch()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [2, 9, 40])  # of 1 DynamicSlidingWindowLayer keeps all
@pytest.mark.parametrize("record", [False, True])
def test_a_window_is_dynamic_sliding_window_layer(
    window: int, format: str | None, record: bool
) -> None:
    """Through prompts longer than the window, many moves of its rows, and crops while recording."""
    r = random.Random(window)
    ours, theirs = PackedSlidingLayer(window, format), DynamicSlidingWindowLayer(window)
    if record:
        for layer in (ours, theirs):
            layer.activate_past_recording()
    recorded = 0
    for step in range(60):
        k, v = rows(1, r.choice((1, 1, 1, 5, 70) if step % 20 else (400,)), step)
        assert_same(ours, theirs, *both(ours, theirs, format, k, v))
        recorded += k.shape[2]
        if record and step % 3 == 0:
            count, recorded = -r.choice((0, 0, 1, recorded)), 0
            for layer in (ours, theirs):
                layer.crop(count)
    assert ours.keys.shape[2] <= 400 + window + SLACK


def test_a_window_that_is_gone_cannot_be_cropped_to() -> None:
    layer = PackedSlidingLayer(8)
    layer.update(*rows(1, 3, 0))
    layer.crop(-1)
    assert layer.get_seq_length() == 2
    for step in range(2 * SLACK):
        layer.update(*rows(1, 1, step))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-layer.end)
    with pytest.raises(ValueError, match="negative"):
        layer.crop(3)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_written_in_place(format: str | None) -> None:
    """New tensors by doubling, then by steps; else no allocation, and no row is moved."""
    layer = PackedLayer(format)
    memory: dict[int, int] = {}
    total = FIRST * 8
    for step in range(total // 32):
        layer.update(*rows(1, 32, step))
        memory[layer.keys.shape[2]] = layer.keys.data_ptr()
        assert layer.keys.data_ptr() == memory[layer.keys.shape[2]]
    assert list(memory) == [FIRST, FIRST * 2, FIRST * 4, FIRST * 8]
    assert layer._capacity(10 * STEP + 1, 10 * STEP) == 11 * STEP
    f = formats.get((format or "f32").removesuffix("_rotated"))
    assert layer.keys.nbytes == HEADS * total * f.row_bytes(DIM)


def test_views_of_dense_rows_share_the_memory() -> None:
    layer = PackedLayer()
    k, _ = layer.update(*rows(1, 3, 0))
    assert k.data_ptr() == layer.keys.data_ptr()


def test_a_window_stays_small() -> None:
    layer = PackedSlidingLayer(32, "q8_0")
    for step in range(40):
        layer.update(*rows(1, 32, step))
    assert layer.keys.shape[2] <= 32 - 1 + SLACK
    memory = layer.keys.data_ptr()
    for step in range(40):
        layer.update(*rows(1, 32, step))
    assert layer.keys.data_ptr() == memory
    layer.update(*rows(1, 1000, 0))
    layer.update(*rows(1, 1, 0))
    assert layer.keys.shape[2] <= 32 - 1 + SLACK  # the room of a long prompt is given back


class _Moved(TorchDispatchMode):
    """Bytes that copies read and write."""

    bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op._schema.name in ("aten::clone", "aten::copy_"):
            self.bytes += 2 * out.nbytes
        return out


@pytest.mark.parametrize("window", [9, 1024])
def test_what_a_window_moves(window: int) -> None:
    """4 / SLACK of the rows that attention reads, as PackedSlidingLayer says."""
    layer = PackedSlidingLayer(window, "q8_0")
    layer.update(*rows(1, window - 1 + SLACK, 0))
    tokens = 3 * SLACK
    with _Moved() as moved:
        for _ in range(tokens):
            layer.room(1)
    read = 2 * HEADS * (window - 1) * formats.get("q8_0").row_bytes(DIM)
    assert moved.bytes / tokens == 4 / SLACK * read


def config(**options: Any) -> Any:
    return tiny_llama(**options).config


def test_what_it_is_made_of() -> None:
    mistral = SimpleNamespace(
        layer_types=["full_attention", "sliding_attention", "linear_attention"],
        per_layer_config=[SimpleNamespace(sliding_window=16)] * 3,
        _attn_implementation="sdpa",
    )
    mistral.get_text_config = lambda decoder: mistral
    cache = PackedCache(mistral, "Q8_0")
    assert cache.format == "f16/q8_0" and cache.is_sliding == [False, True, False]
    assert [type(layer).__name__ for layer in cache.layers][:2] == [
        "PackedLayer",
        "PackedSlidingLayer",
    ]
    assert cache.layers[1].sliding_window == 16 and cache.is_linear == [False, False, True]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown 'q9'"):
        PackedCache(config(), "q9")
    with pytest.raises(ValueError, match="format: iq2_xs is only read here"):
        PackedCache(config(), "iq2_xs")
    number: Any = 5
    with pytest.raises(ValueError, match="format: 5; must be None or the name of a format"):
        PackedCache(config(), number)
    wrong: Any
    for wrong in (0, -1, 1.5, "x", True):
        with pytest.raises(ValueError, match=f"slots: {wrong!r}; must be None or a whole number"):
            PackedCache(config(), slots=wrong)
    k, v = rows(1, 2, 0)
    with pytest.raises(ValueError, match="not a multiple of the block"):
        PackedCache(config(), "q4_k").update(k, v, 0)
    with pytest.raises(ValueError, match="name a format"):
        PackedCache(config()).update(k.double(), v.double(), 0)
    with pytest.raises(ValueError, match="keeps no gradient"):
        PackedCache(config()).update(k.requires_grad_(), v, 0)


@pytest.mark.parametrize(
    ("asked", "name", "keys"),
    [
        ("q8_0", "f16/q8_0", "f16"),
        ("Q8_0/q4_0", "q8_0/q4_0", "q8_0"),
        ("q4_0/q4_0", "q4_0/q4_0", "q4_0"),
        ("q4_0_rotated", "f16/q4_0_rotated", "f16"),
        ("Q8_0/Q4_0_Rotated", "q8_0/q4_0_rotated", "q8_0"),
        ("f16", "f16", "f16"),
    ],
)
@pytest.mark.parametrize("slots", [None, 8])
def test_formats_of_keys_and_values(asked: str, name: str, keys: str, slots: int | None) -> None:
    """One name of a packed format is that of the values, beside keys in f16."""
    cache = PackedCache(config(), asked, slots)
    assert cache.format == name
    k, v = rows(1, 3, 0)
    got = [t[:, :, :3] for t in cache.update(k, v, 0)]
    assert torch.equal(got[0], as_kept(keys, k))
    assert torch.equal(got[1], as_kept(name.split("/")[-1], v))


@pytest.mark.parametrize("format", [None, "f16", "q8_0"])
@pytest.mark.parametrize("slots", [None, 8])
def test_values_of_other_sizes_than_keys_are_refused(format: str | None, slots: int | None) -> None:
    """A copy would broadcast them."""
    cache = PackedCache(config(), format, slots)
    k, v = rows(2, 3, 0)
    for _ in range(2):  # without rows, and beside some
        for wrong in (v[:, :1], v[:1], v[:, :, :1], k[:, :, 1:]):
            with pytest.raises(ValueError, match="PackedCache: values .*; must be"):
                cache.update(k, wrong, 0)
        with pytest.raises(ValueError, match=r"keys \[2, 3, 64\]; must be \[B, kv_heads, S, D\]"):
            cache.update(k[0], v[0], 0)
        cache.update(k, v, 0)


@pytest.mark.parametrize("format", ["f16", "f16/f32", "q8_0"])
@pytest.mark.parametrize("slots", [None, 8])
def test_keys_that_f16_makes_infinite_are_refused(format: str, slots: int | None) -> None:
    cache = PackedCache(config(), format, slots)
    for count in (1, 2):
        k, v = rows(1, 1, count)
        cache.update(k, v, 0)
        with pytest.raises(ValueError, match="k: has 100000, which f16 cannot hold"):
            cache.update(torch.where(k == k.max(), 1e5, k), v, 0)
        assert int(cache.get_seq_length()) == count


@pytest.mark.parametrize("slots", [None, 8])
def test_a_step_that_failed_in_code_of_others_is_not_gone_on_from(slots: int | None) -> None:
    """Of a first one nobody knows which layers were to come; of a later one all do."""
    cache, (k, v) = PackedCache(config(), slots=slots), rows(1, 1, 0)
    cache.update(k, v, 0)  # and then the model failed
    cache.update(k, v, 0)
    with pytest.raises(ValueError, match=r"a step failed; call reset\(\)"):
        cache.update(k, v, 1)
    cache.reset()
    for layer in (0, 1, 0, 0, 1):  # the second step failed
        cache.update(k, v, layer)
    assert int(cache.get_seq_length()) == int(cache.get_seq_length(1)) == 2


def test_slots_are_advanced_once_for_all_layers() -> None:
    cache, (k, v) = PackedCache(config(num_hidden_layers=5), "q8_0", slots=8), rows(1, 1, 0)
    for _ in range(2):
        with Calls() as calls:
            for layer in range(5):
                cache.update(k, v, layer)
    counted = [name for name in calls.others if name in ("add_", "arange")]
    assert counted == ["add_"] and int(cache.get_seq_length()) == 2


def test_slots_are_parts_of_one_tensor_that_grows() -> None:
    """No op makes the slots of a token. Numbers hold in any mode, also behind those first made."""
    cache, (k, v) = PackedCache(config(num_hidden_layers=3), "q8_0"), rows(1, 1, 0)
    with torch.inference_mode():
        for layer in range(3):
            cache.update(k, v, layer)
        with Calls() as calls:
            for layer in (0, 1, 2) * 5:
                cache.update(k, v, layer)
    assert calls.others == []
    slots = cache.layers[0].slots
    for first, count in ((6, 2), (4095, 0), (4095, 3), (9000, 16), (0, 1), (100_000, 1)):
        for _ in range(2):
            where, length = slots.of(first, count, torch.device("cpu"))
            assert where.tolist() == [*range(first, first + count)] and length == first + count
            assert where.dtype == length.dtype == torch.int64 and length.dim() == 0
            assert not where.is_inference()
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.layers[0].slots.of(3, 2, torch.device("cpu"))[0].tolist() == [3, 4]


@pytest.mark.parametrize("format", ["f16", "q8_0"])
def test_keys_and_values_of_two_sizes(format: str) -> None:
    layer = PackedLayer(format)
    k, v = activations(1, 2, 3, 96), activations(1, 2, 3, 64, seed=1)
    got = layer.update(k, v)
    for a, b in zip(got, (k, v), strict=True):
        assert torch.equal(a, unpack(format, pack(format, b), b.shape[-1]))


@pytest.mark.parametrize("format", ["f16", "q8_0"])
def test_copies_and_pickles(format: str) -> None:
    cache = PackedCache(config(), format)
    cache.update(*rows(1, 5, 0), 0)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        k, v = rows(1, 1, 1)
        got, want = other.update(k, v, 0), copy.deepcopy(cache).update(k, v, 0)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert cache.get_seq_length() == 5


def test_packed_rows_decode_themselves() -> None:
    """Wherever a tensor is taken, or a method of one."""
    k, _ = rows(1, 4, 0)
    packed = pack("q8_0", k)
    want = unpack("q8_0", packed, DIM)
    r = PackedEntries(packed, "q8_0", DIM, torch.float32)
    assert r.shape == want.shape and r.dtype == want.dtype and r.device == want.device
    assert torch.equal(torch.cat([r, want], 2), torch.cat([want, want], 2))
    assert torch.equal(torch.matmul(want, r.transpose(-1, -2)), want @ want.mT)
    assert torch.equal(r[:, :, 1:], want[:, :, 1:]) and r.size(2) == 4
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(sdpa(want, r, r), sdpa(want, want, want))

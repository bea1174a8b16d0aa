"""attention by torch's scaled_dot_product_attention: when, with what, and in which panels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_oracle import Traits, attention
from backends import CPU
from cache_cases import Call, Layer, layer
from inputs import activations
from oracle import check
from random_calls import attend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_metalmm import _C
from torch_metalmm.hf.attention import attention_forward
from torch_metalmm.hf.caches.layers import PackedLayer
from torch_metalmm.testing import emulated

QUERIES, SLOTS, DIM = 20, 70, 64
SDPA = "aten::scaled_dot_product_attention"


@pytest.fixture
def cuda() -> Iterator[None]:
    """The engine of shaders, on the CPU, with the plans that an NVIDIA GPU gets."""
    with emulated(chip=_C.CUDA):
        yield


def events(run: Any) -> dict[str, list[list[int]]]:
    """{op of torch that `run` calls: the sizes of the arguments of its first call}."""
    with torch.profiler.profile(record_shapes=True) as seen:
        run()
    return {event.name: event.input_shapes for event in reversed(seen.events())}


def call(cache: Layer, dtype: torch.dtype = torch.float16, **traits: Any) -> Call:
    q = activations(1, 4, QUERIES, DIM, dtype=dtype, seed="q")
    return Call(q, cache, Traits(**traits))


def cached(capacity: int, length: int, name: str = "f16") -> Layer:
    return layer((1, 2, capacity, DIM), length, (name, name))


def filled(c: Call, strategy: str | None = None) -> Tensor:
    """The result without a length: the host knows that all slots hold rows."""
    rows, t = c.cache, c.traits
    names = (rows.format_k, rows.format_v, None)
    y: Tensor = torch.ops.metalmm.attention(
        c.q, rows.keys, rows.values, *names, **t.kwargs(), strategy=strategy
    )
    return y


def checked(c: Call, y: Tensor, halved: torch.dtype | bool) -> None:
    want = attention(c.q, c.cache.k, c.cache.v, c.traits, halved)
    check(y, want.store(c.q.dtype), "sdpa")


@pytest.mark.parametrize(
    ("slots", "traits", "is_masked"),
    [
        (QUERIES, {}, False),
        (QUERIES, {"causal": False}, False),
        (SLOTS, {"causal": False}, False),
        (SLOTS, {"causal": False, "window": SLOTS}, False),
        (SLOTS, {}, True),
        (QUERIES, {"window": 7}, True),
    ],
)
@pytest.mark.parametrize("name", ["f16", "q8_0"])
def test_a_mask_only_where_it_hides(
    slots: int, traits: dict[str, Any], is_masked: bool, name: str, cuda: None
) -> None:
    """A prompt into an empty cache is torch's causal attention, without a mask."""
    c = call(cached(slots, slots, name), **traits)
    found = events(lambda: checked(c, filled(c), torch.float16))
    assert bool(found[SDPA][3]) == is_masked


def test_a_length_of_the_device_is_not_waited_for(cuda: None) -> None:
    """Slots behind it, which hold NaN, are hidden by a mask."""
    c, got = call(cached(4 * QUERIES, SLOTS)), []
    found = events(lambda: got.append(attend(c, CPU)))
    checked(c, got[0], torch.float16)
    assert found[SDPA][3] == [QUERIES, 4 * QUERIES]
    assert not {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"} & found.keys()


@pytest.mark.parametrize(
    ("c", "asked"),
    [
        (call(cached(4 * QUERIES + 1, SLOTS)), {}),
        (call(cached(SLOTS, SLOTS), softcap=9.0), {}),
        (call(cached(SLOTS, SLOTS), mask=torch.zeros(1, 1, QUERIES, SLOTS)), {}),
        (call(cached(SLOTS, SLOTS), torch.float32), {}),
        (call(cached(SLOTS, SLOTS)), {"backends": SDPBackend.MATH}),
    ],
    ids=["empty slots", "soft cap", "mask that is added", "f32", "torch has no fused kernel"],
)
def test_a_kernel_computes_the_others(c: Call, asked: dict[str, Any], cuda: None) -> None:
    """Among them a call for which torch would store all scores."""
    with sdpa_kernel(asked.get("backends", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])):
        found = events(lambda: checked(c, attend(c, CPU), c.q.dtype == torch.float16))
    assert SDPA not in found


def test_a_cpu_takes_it_by_name_alone() -> None:
    c = call(cached(SLOTS, SLOTS, "f32"), torch.float32)
    assert SDPA not in events(lambda: checked(c, filled(c), False))
    assert SDPA in events(lambda: checked(c, filled(c, strategy="sdpa"), True))


def test_panels_of_queries() -> None:
    """A mask of 5200 x 5200 and what torch makes of it are 135 MB: two panels."""
    n, window = 5200, 50
    cache = layer((1, 1, n, 16), n, ("f32", "f32"))
    q = activations(1, 1, n, 16, seed="q")
    y = filled(Call(q, cache, Traits(window=window)), "sdpa")
    first = n - 100
    sizes = {"heads": 1, "kv_heads": 1, "queries": n, "window": window, "filled": True}
    asked = {"n": n, "k": 16, "dtype": "f32", "format": "f32", "chip": "m1", "strategy": "sdpa"}
    assert first < _C.plan("attention", **asked, attention=sizes)["sdpa"]["queries"] < n
    for queries in (slice(0, 100), slice(first, n)):
        k, v = (t[:, :, : queries.stop] for t in (cache.k, cache.v))
        want = attention(q[:, :, queries], k, v, Traits(window=window), torch.float32)
        check(y[:, queries], want, f"{queries}")


def test_panels_of_heads() -> None:
    """16000 rows of 256 values of two heads are 66 MB: three heads of a sequence are two panels, of
    which a head of q each is compared."""
    cache = layer((1, 3, 16000, 256), 16000, ("q8_0", "q8_0"))
    mask = activations(1, 6, 2, 16000, seed="m") > 0
    q, some = activations(1, 6, 2, 256, seed="q"), [1, 5]
    y = filled(Call(q, cache, Traits(mask=mask)), "sdpa")[:, :, some]
    k, v, traits = cache.k[:, ::2], cache.v[:, ::2], Traits(mask=mask[:, some])
    check(y, attention(q[:, some], k, v, traits, torch.float32).store(torch.float32), "sdpa")


def test_a_mask_has_a_column_for_every_slot() -> None:
    c = call(cached(SLOTS, SLOTS), mask=torch.ones(1, 1, QUERIES, SLOTS - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask: 69 columns; without a length all 70 slots"):
        filled(c)


@pytest.mark.parametrize("format", [None, "q8_0"])
def test_a_prompt_of_transformers_needs_no_mask(format: str | None, cuda: None) -> None:
    """Of a cache whose memory is larger, by the attention function and by room()."""
    kept = PackedLayer(format)
    kept.returns_packed = True
    k, v = (activations(1, 2, QUERIES, DIM, dtype=torch.float16, seed=s) for s in "kv")
    q = activations(1, 4, QUERIES, DIM, dtype=torch.float16, seed="q")
    rows = kept.update(k, v)
    module: Any = SimpleNamespace(is_causal=True)
    found = events(lambda: attention_forward(module, q, *rows, None))
    assert kept.keys.shape[2] > QUERIES and not found[SDPA][3]
    kept.reset()
    room = kept.room(QUERIES)
    assert room.keys.shape[2] == room.values.shape[2] == QUERIES and room.length is None


def test_torch_multiplies_over_few_slots_at_a_time() -> None:
    """On MPS products over 32767 values and more are wrong: attention of torch's ops, its gradient,
    and that of linear by few columns."""
    q = torch.randn(1, 1, 2, 32, requires_grad=True)
    rows = torch.randn(1, 1, 40000, 32)
    w = torch.zeros(40000, 32)
    with torch.profiler.profile(record_shapes=True) as seen:
        y = torch.ops.metalmm.attention(q, rows, rows, "f32", "f32", None, strategy="torch")
        y.sum().backward()
        grad = torch.ops.metalmm.linear_input_grad(torch.ones(2, 40000), w, "f32", 32)
    assert torch.isfinite(grad).all()
    first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm_": 1}
    shapes = [e.input_shapes[first[e.name]] for e in seen.events() if e.name in first]
    inner = [shape[-1] for shape in shapes]
    assert inner and max(inner) <= 32766
    own = torch.arange(40000) <= torch.arange(39998, 40000)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, rows, rows, own)
    torch.testing.assert_close(y, want.transpose(1, 2))

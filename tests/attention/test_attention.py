"""attention against float64, on every engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_oracle import Traits, attention
from backends import CPU, Backend
from cache_cases import Call, layer, pack
from inputs import activations, random_weight
from oracle import check
from random_calls import attend, check_call, halved, has_kernels, has_sdpa, random_call
from torch import Tensor

from torch_metalmm import _C, formats

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules


STRATEGIES = ("attention_split", "attention_tile", "torch", "sdpa")


def checked(c: Call, backend: Backend, what: str, strategy: str | None = None) -> Tensor:
    y = attend(c, backend, strategy)
    assert y.dtype == c.q.dtype and y.is_contiguous()
    rounded = halved(c, backend, strategy)
    check(y, attention(c.q, c.cache.k, c.cache.v, c.traits, rounded).store(c.q.dtype), what)
    return y


@pytest.mark.isa
@pytest.mark.quick
def test_random_calls(backend: Backend) -> None:
    """A few of those that tests/fuzz.py runs, fewer where another run forces the instructions;
    slots behind the length hold NaN."""
    usual = 150 if _C.cpu_isa() == _C.cpu_isas()[0] else 50
    for seed in range(12 if backend.is_slow else usual):
        check_call(random_call(seed, 130 if backend.is_slow else 700), backend, f"{seed}")


@pytest.mark.parametrize("way", STRATEGIES)
def test_every_strategy_computes_the_same(way: str, backend: Backend) -> None:
    """Forced, whatever the number of queries."""
    for seed in range(1000, 1012 if backend.is_slow else 1040):
        c = random_call(seed, 130 if backend.is_slow else 700)
        has = has_sdpa(c) if way == "sdpa" else way == "torch" or has_kernels(c)
        if has or (backend.name == "cpu" and way != "sdpa"):
            check_call(c, backend, f"{seed}", way)
            continue
        why = "computes attention without" if way == "sdpa" else "has no kernel"
        with pytest.raises(ValueError, match=f"strategy: {way} {why}"):
            attend(c, backend, way)


@pytest.mark.parametrize("queries", [1, 20])
def test_slots_that_are_one(queries: int, backend: Backend) -> None:
    """A cache whose rows have no distance, which weights of any kind sum up to its row.

    Halves are rounded when they are stored, and as weights of tiles.
    """
    row = activations(1, 64, dtype=torch.float16, seed="v")
    q = activations(queries, 64, dtype=torch.float16, seed="q").view(1, 1, queries, 64)
    rows = backend.put_view(row.expand(1, 1, 70, 64))
    y = ops.attention(backend.put(q), rows, rows, "f16", "f16", backend.put(torch.tensor(70)))
    unit = torch.finfo(torch.float16).eps / 2
    assert (y.cpu()[0, :, 0] - row).abs().le(2 * unit * row.abs()).all()


def test_keys_of_f16_between_the_words_of_values(backend: Backend) -> None:
    """Rows of keys begin at multiples of 2 bytes, those of values at multiples of 4."""
    cache = layer((1, 1, 70, 64), 65, ("f16", "f32"))
    wide = torch.zeros(1, 1, 70, 65, dtype=torch.float16)
    wide[..., :64] = cache.keys
    call = Call(activations(1, 2, 3, 64, seed="q"), replace(cache, keys=wide[..., :64]), Traits())
    for strategy in STRATEGIES[:2]:
        checked(call, backend, strategy, strategy)


@pytest.mark.parametrize("length", [65, 200, 4500, 9000])
def test_parts_of_a_long_context(length: int, backend: Backend) -> None:
    """Lengths at which parts are longer than the shortest, and shorter than the cache."""
    cache = layer((1, 1, max(4700, length + 200), 64), length, ("q8_0", "q8_0"))
    calls = product((1, 9), STRATEGIES[:2]) if length < 4500 else [(1, "attention_split")]
    for queries, strategy in calls:
        q = activations(1, 2, queries, 64, seed="q")
        window = 70 if queries == 9 else 0
        checked(Call(q, cache, Traits(window=window)), backend, f"{length} {queries}", strategy)


def test_heads_of_more_values_than_are_decoded_at_a_time() -> None:
    """As of latent attention: on a CPU the tile kernel takes 512 values of a row at a time."""
    cache = layer((1, 1, 70, 576), 67, ("q8_0", "f16"))
    for queries in (3, 20):
        q = activations(1, 2, queries, 576, seed="q")
        checked(Call(q, cache, Traits()), CPU, f"S={queries}")


@pytest.mark.formats
def test_every_format(name: str, backend: Backend) -> None:
    """Keys of every format whose block divides the head, with values of f16; and the other way."""
    block = formats.get(name).block_values
    dim = 64 if block <= 64 else block

    def rows(name: str, x: Tensor) -> Tensor:
        return pack(name, x) if formats.get(name).packs else random_weight(name, *x.shape)

    for names, queries in product(((name, "f16"), ("f16", name)), (1, 3, 17)):
        cache = layer((1, 2, 70, dim), 67, names, packed_rows=rows)
        q = activations(1, 4, queries, dim, seed="q")
        checked(Call(q, cache, Traits()), backend, f"{names} S={queries}")


@pytest.mark.parametrize("queries", [1, 20])
def test_a_query_that_sees_nothing_gives_zero(queries: int, backend: Backend) -> None:
    """As torch's SDPA does: no slot, a closed mask, one of -inf; with sinks too, also of -inf."""
    q = activations(1, 2, queries, 64, seed="q")
    shape = (1, 1, queries, 8)
    closed = torch.zeros(shape, dtype=torch.bool)
    for length, mask, sinks in (
        (0, None, None),
        (5, closed, None),
        (5, torch.full(shape, -torch.inf), None),
        (5, closed, torch.tensor([1.0, -3.0])),
        (5, closed, torch.tensor([-torch.inf, -3.0])),
    ):
        cache = layer((1, 1, 8, 64), length, ("q8_0", "q8_0"))
        for way in (None, *STRATEGIES[:3]):
            y = attend(Call(q, cache, Traits(mask=mask, sinks=sinks)), backend, way)
            assert torch.equal(y.cpu(), torch.zeros(1, queries, 2, 64)), (length, way)


@pytest.mark.parametrize("way", STRATEGIES[:3])
def test_a_sink_of_minus_infinity_is_none(way: str, backend: Backend) -> None:
    """Beside queries that see nothing, some that see a slot: 3 before the first of 5 slots."""
    cache, q = layer((1, 1, 8, 64), 5, ("q8_0", "q8_0")), activations(1, 2, 8, 64, seed="q")
    without = attend(Call(q, cache, Traits()), backend, way)
    sinks = torch.full((2,), -torch.inf)
    assert torch.equal(attend(Call(q, cache, Traits(sinks=sinks)), backend, way), without)
    assert not without[:, :3].any() and without[:, 3:].any(-1).all()


@pytest.mark.parametrize("way", (None, *STRATEGIES[:3]))
def test_many_queries_of_few_slots(way: str | None, backend: Backend) -> None:
    """Whole blocks of queries that see nothing, whose rows nothing writes but zeros."""
    q, cache = activations(1, 2, 300, 64, seed="q"), layer((1, 1, 8, 64), 5, ("q8_0", "q8_0"))
    torch.use_deterministic_algorithms(True)  # so that new memory is NaN
    try:
        y = checked(Call(q, cache, Traits()), backend, "300 of 5", way).cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not y[:, :295].any() and y[:, 295:].any(-1).all()


@pytest.mark.parametrize("length", [-1, -(2**40), 9])
def test_a_length_that_the_cache_cannot_have(length: int, backend: Backend) -> None:
    """Refused where the host sees it; a device takes the nearest, -1 as 0."""
    cache, q = layer((1, 1, 8, 64), 8, ("q8_0", "q8_0")), activations(1, 2, 3, 64, seed="q")
    call = Call(q, replace(cache, length=length), Traits())
    for way in (None, *STRATEGIES[:3]):
        if backend.device == "cpu":
            with pytest.raises(ValueError, match=f"length: {length}; the cache has 8 slots"):
                attend(call, backend, way)
            continue
        nearest = replace(cache, length=min(max(length, 0), 8))
        want = attend(Call(q, nearest, Traits()), backend, way)
        assert torch.equal(attend(call, backend, way), want)


def test_packed_rows_of_a_dense_format(backend: Backend) -> None:
    """uint8 rows of f16 are taken as values of f16 are."""
    cache = layer((1, 2, 9, 64), 9, ("f16", "f32"))
    q = backend.put(activations(1, 2, 3, 64, seed="q"))
    length = backend.put(torch.tensor(9))
    rows = [backend.put(t) for t in (cache.keys, cache.values)]
    y = ops.attention(q, *rows, "f16", "f32", length)
    as_bytes = [t.view(torch.uint8) for t in rows]
    assert torch.equal(ops.attention(q, *as_bytes, "f16", "f32", length), y)


@pytest.mark.parametrize("queries", [2, 30])
def test_a_window_wider_than_any_cache_is_none(queries: int, backend: Backend) -> None:
    """Also of queries before the first slot, from which 2^63 - 1 cannot be taken away."""
    q, cache = activations(1, 2, queries, 64, seed="q"), layer((1, 1, 9, 64), 1, ("f16", "f16"))
    for causal in (False, True):
        want = attend(Call(q, cache, Traits(causal=causal)), backend)
        for window in (64, 2**40, 2**62, 2**63 - 1):
            traits = Traits(window=window, causal=causal)
            assert torch.equal(attend(Call(q, cache, traits), backend), want), window


def test_threads_change_no_bit(backend: Backend) -> None:
    cache = layer((2, 2, 900, 64), 900, ("q8_0", "f16"))
    for queries in (1, 5, 30) if not backend.chip() else ():
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            q = activations(2, 8, queries, 64, seed="q")
            results.append(attend(Call(q, cache, Traits()), backend))
        assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_gradients_are_those_of_torch(queries: int, backend: Backend) -> None:
    """Through dense rows: q, keys, values, mask and sinks, as float64 autograd has them."""
    length, dim = 23, 64
    shapes = (
        (2, 4, queries, dim),
        (2, 2, length, dim),
        (2, 2, length, dim),
        (1, 4, queries, length),
    )
    tensors = [activations(*s, seed=i) for i, s in enumerate(shapes)]
    sinks = activations(4, seed="s")
    leaves = [backend.put(t).requires_grad_() for t in (*tensors, sinks)]
    q, k, v, mask, sink = leaves
    y = ops.attention(
        q, k, v, "f32", "f32", backend.put(torch.tensor(length)), mask=mask, sinks=sink, softcap=9.0
    )
    g = backend.put(activations(*y.shape, seed="g"))
    got = torch.autograd.grad(y, leaves, g)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    q, k, v, mask, sink = exact
    want = attention(q, k, v, Traits(mask=mask, sinks=sink, softcap=9.0)).exact
    for a, b in zip(got, torch.autograd.grad(want, exact, g.cpu().double()), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-5)


def test_packed_entries_have_no_gradient(backend: Backend) -> None:
    cache = layer((1, 2, 9, 64), 9, ("q8_0", "f16"))
    q = backend.put(activations(1, 2, 3, 64)).requires_grad_()
    args = ("q8_0", "f16", backend.put(torch.tensor(9)))
    entries = [backend.put(t) for t in (cache.keys, cache.values)]
    with pytest.raises(ValueError, match="q: requires grad.*packed entries"):
        ops.attention(q, *entries, *args)
    with torch.no_grad():
        ops.attention(q, *entries, *args)


@pytest.mark.parametrize("softcap", [0.0, 9.0])
@pytest.mark.parametrize("way", STRATEGIES[:3])
def test_a_nan_reaches_the_result(way: str, softcap: float, backend: Backend) -> None:
    """Of q, of a key or of a value that is seen; a key that is not seen stays out, but of sdpa."""
    cache = layer((1, 1, 9, 64), 9, ("f32", "f32"))
    q = activations(1, 1, 2, 64, seed="q")
    for t in (q, cache.keys, cache.values):
        saved = t.clone()
        t[..., -1, :] = torch.nan
        y = attend(Call(q, cache, Traits(softcap=softcap)), backend, way).cpu()
        assert y[0, 1].isnan().all()
        if t is cache.keys:  # of the last slot, which only the last query sees
            assert not y[0, 0].isnan().any()
        t.copy_(saved)


@pytest.mark.parametrize("way", STRATEGIES[:2])
@pytest.mark.parametrize("slots", [400, 700])
def test_a_nan_before_the_window_stays_out(slots: int, way: str) -> None:
    """Wherever what a CPU multiplies at a time begins."""
    cache = layer((1, 1, slots, 64), slots, ("f32", "f32"))
    cache.keys[0, 0, 100] = cache.values[0, 0, 100] = torch.nan
    q = activations(1, 1, 20, 64, seed="q")
    assert attend(Call(q, cache, Traits(window=8)), CPU, way).isfinite().all()


@pytest.mark.isa
@pytest.mark.parametrize("window", [0, 100])
def test_a_prompt_may_be_cut_anywhere(window: int) -> None:
    """The bits of a query are those that it has beside others, over chunks of 512 slots."""
    cache = layer((1, 2, 900, 64), 900, ("q8_0", "f16"))
    q = activations(1, 4, 900, 64, seed="q")
    whole = attend(Call(q, cache, Traits(window=window)), CPU, "attention_tile")
    for first, last in ((0, 20), (0, 513), (100, 137), (512, 700), (883, 900), (899, 900)):
        part = Call(q[:, :, first:last], replace(cache, length=last), Traits(window=window))
        got = attend(part, CPU, "attention_tile")
        assert torch.equal(got, whole[:, first:last]), (first, last)


@pytest.mark.parametrize("slots", [37, 320])  # one part, and five of a GPU
@pytest.mark.parametrize("way", STRATEGIES[:3])
def test_an_infinity_of_the_last_slot_stays_one(way: str, slots: int, backend: Backend) -> None:
    """Whatever is read behind the last slot, or behind the last part."""
    cache = layer((1, 1, slots + 3, 64), slots, ("f32", "f32"))
    cache.values[0, 0, slots - 1, 5] = torch.inf
    q = activations(1, 1, 1, 64, seed="q")
    y = attend(Call(q, cache, Traits()), backend, way).cpu()
    assert y[0, 0, 0, 5] == torch.inf and y.isfinite().sum() == 63


@pytest.mark.parametrize("way", STRATEGIES[:3])
@pytest.mark.parametrize("size", [16, 64, 80])
def test_a_score_of_minus_infinity_hides_its_slot(size: int, way: str, backend: Backend) -> None:
    """Also where lanes of a GPU have no values of the head."""
    cache = layer((1, 1, 40, size), 37, ("f32", "f32"))
    cache.keys[0, 0, 3, size - 1] = -torch.inf
    q = activations(1, 1, 1, size, seed="q")
    q[..., size - 1] = 1
    assert attend(Call(q, cache, Traits()), backend, way).isfinite().all()


@pytest.mark.parametrize("way", [None, *STRATEGIES])
def test_no_heads_of_q_give_no_rows(way: str | None, backend: Backend) -> None:
    cache = layer((1, 1, 8, 64), 5, ("f16", "f16"))
    y = attend(Call(torch.ones(1, 0, 1, 64), cache, Traits()), backend, way)
    assert y.shape == (1, 1, 0, 64)

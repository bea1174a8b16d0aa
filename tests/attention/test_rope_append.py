"""rope_append: q of rope, and a cache as cache_append would leave it, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from backends import Backend
from cache_cases import CACHE_FORMATS, unwritten
from inputs import activations, generator
from oracle import DTYPES
from torch import Tensor

from torch_metalmm import formats

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sequences, positions, heads of q and of k and v, values of a head, of which some rotate."""

    batch: int
    positions: int
    heads: int
    kv_heads: int
    dim: int
    rotated: int

    @property
    def values(self) -> tuple[int, int]:
        """Values of q and k, and of v, a position."""
        return (self.heads + self.kv_heads) * self.dim, self.kv_heads * self.dim


SHAPES = (
    Shape(1, 1, 4, 2, 64, 64),
    Shape(2, 3, 2, 1, 128, 96),
    Shape(1, 2, 3, 3, 96, 0),
    Shape(2, 1, 2, 2, 192, 192),
    Shape(1, 5, 1, 1, 256, 130),
)
CAPACITY = 11


def empty_cache(name: str, s: Shape, view: bool) -> Tensor:
    """Slots that nobody wrote; with `view`, every second head and the middle of a larger cache."""
    heads, slots = (2 * s.kv_heads, CAPACITY + 3) if view else (s.kv_heads, CAPACITY)
    return unwritten(name, s.batch, heads, slots, s.dim, byte=17)


def part_of(cache: Tensor, view: bool) -> Tensor:
    return cache[:, ::2, 2:-1] if view else cache


def operands(s: Shape, dtype: torch.dtype, apart: bool) -> dict[str, Tensor]:
    """qkv, cos and sin; v where it is apart."""
    qk, values = s.values
    seed = (s, dtype)
    wide = torch.randn(s.batch, s.positions, qk + values + 5, generator=generator(seed)) * 3
    qkv = wide.to(dtype)[..., 2:-3]
    angle = 3 * activations(s.batch if apart else 1, s.positions, s.rotated, seed="angle")
    out = {"qkv": qkv[..., :qk] if apart else qkv}
    out |= {"cos": angle.cos().to(dtype), "sin": angle.sin()}
    return out | ({"v": qkv[..., qk:]} if apart else {})


def options(s: Shape, dtype: torch.dtype, backend: Backend, norms: str) -> dict[str, Any]:
    """norms: of each "head", of the "whole" row of q and of k and of v beside them, or ""."""
    if not norms:
        return {}
    counts = (s.heads, s.kv_heads) if norms == "whole" else (1, 1)
    q_norm, k_norm = (
        backend.put(activations(n * s.dim, dtype=dtype, seed=i))
        for n, i in zip(counts, "qk", strict=True)
    )
    found = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS, "offset": 1.0, "interleaved": True}
    return found | {"v_norm": norms == "whole"}


def check_append(
    s: Shape, names: tuple[str, str], dtype: torch.dtype, traits: tuple[bool, str], view: bool,
    backend: Backend,
) -> None:  # fmt: skip
    """Both ways leave the same bytes in all of the memory of the cache, slots in any order."""
    apart, norms = traits
    put = {k: backend.put_view(t) for k, t in operands(s, dtype, apart).items()}
    v = {"v": put.pop("v")} if apart else {}
    more = options(s, dtype, backend, norms) | v
    slots = backend.put(torch.randperm(CAPACITY, generator=generator(s))[: s.positions])
    caches = [[backend.put(empty_cache(n, s, view)) for n in names] for _ in range(2)]
    keys, values = (part_of(c, view) for c in caches[0])
    q, k, new_v = ops.rope(*put.values(), s.heads, s.kv_heads, **more)
    ops.cache_append(keys, values, k, new_v, slots, *names)
    keys, values = (part_of(c, view) for c in caches[1])
    got = ops.rope_append(*put.values(), s.heads, s.kv_heads, keys, values, slots, *names, **more)
    assert torch.equal(got, q) and got.is_contiguous() and got.dtype == dtype
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (s, names)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_shapes(s: Shape, dtype: torch.dtype, backend: Backend) -> None:
    """v of qkv or apart, norms, pairs, a view of a larger cache."""
    for name in ("q8_0", "q4_0", "f16"):
        for norms, apart in product(("", "head", "whole"), (False, True)):
            check_append(s, (name, name), dtype, (apart, norms), bool(norms), backend)


@pytest.mark.quick
@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_formats(name: str, backend: Backend) -> None:
    """Of keys, of values, of both, of values beside keys in f16; dense formats of every dtype."""
    s = Shape(2, 3, 2, 2, 64, 48)
    for dtype in DTYPES:
        check_append(s, (name, name), dtype, (False, ""), False, backend)
    check_append(s, ("f16", name), torch.bfloat16, (True, "head"), True, backend)
    check_append(s, (name, "q8_0"), torch.float16, (True, "head"), True, backend)
    check_append(s, ("f32", name), torch.bfloat16, (False, "whole"), True, backend)


@pytest.mark.every_format
def test_every_format_stores_what_rope_returns(name: str, backend: Backend) -> None:
    dim = max(64, formats.get(name).block_values)
    call = Shape(1, 2, 1, 1, dim, 32), (name, name), torch.float32, (False, ""), False, backend
    if formats.get(name).packs:
        check_append(*call)
        return
    with pytest.raises(ValueError, match=f"format_k: {name} is only read here"):
        check_append(*call)


def test_no_positions_leave_the_cache_alone(backend: Backend) -> None:
    cache = backend.put(empty_cache("q8_0", SHAPES[0], False))
    qkv, none = torch.empty(1, 0, 64 * 8), torch.empty(1, 0, 64)
    slots = torch.empty(0, dtype=torch.int64)
    before = cache.clone()
    qkv, none, slots = (backend.put(t) for t in (qkv, none, slots))
    q = ops.rope_append(qkv, none, none, 4, 2, cache, cache.clone(), slots, "q8_0", "q8_0")
    assert q.shape == (1, 4, 0, 64) and torch.equal(cache, before)


def test_what_is_refused(backend: Backend) -> None:
    """A recorded gradient; on the CPU a slot that is not there, and what a format cannot hold."""
    s = SHAPES[0]
    keys, values = (backend.put(empty_cache("q8_0", s, False)) for _ in range(2))
    before = keys.clone()
    put = {k: backend.put(t) for k, t in operands(s, torch.float32, False).items()}
    rest = (s.heads, s.kv_heads, keys, values)
    slot, names = backend.put(torch.tensor([3])), ("q8_0", "q8_0")
    for name in put:
        changed = put | {name: put[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match="requires grad, but rope_append has no gradient"):
            ops.rope_append(*changed.values(), *rest, slot, *names)
    if backend.device == "cpu":
        with pytest.raises(IndexError, match="slots: 11 is out of range"):
            ops.rope_append(*put.values(), *rest, slot + 8, *names)
    if backend.name == "cpu":
        for at, name in ((-1, "v"), (64 * s.heads, "k")):
            put["qkv"][0, 0, at] = torch.inf
            with pytest.raises(ValueError, match=f"{name}: has NaN or Inf"):
                ops.rope_append(*put.values(), *rest, slot, *names)
    assert torch.equal(keys, before) and torch.equal(values, before)


def test_memory_that_is_shared(backend: Backend) -> None:
    """What is read lies not in the cache, nor keys in values: refused before a write."""
    memory = backend.put(torch.ones(2, 1, 2, 8, 64))
    keys, values = memory
    qkv, angles = backend.put(activations(1, 2, 256)), backend.put(torch.zeros(1, 2, 32))
    slots = backend.put(torch.arange(2))
    inside = keys.view(-1)
    bad: tuple[tuple[tuple[Tensor, ...], str], ...] = (
        ((inside[:512].view(1, 2, 256), angles, keys, values, slots), "qkv: shares .* with keys"),
        ((qkv, inside[:64].view(1, 2, 32), keys, values, slots), "cos: shares .* with keys"),
        ((qkv, angles, keys, values, inside[:4].view(torch.int64)), "slots: shares .* with keys"),
        ((qkv, angles, keys, keys, slots), "values: share memory with keys"),
        (
            (qkv, angles, keys, values[:, :, :1].expand(-1, -1, 8, -1), slots),
            "values: .* own place",
        ),
    )
    for (x, cos, k, v, at), message in bad:
        with pytest.raises(ValueError, match=message):
            ops.rope_append(x, cos, angles, 2, 1, k[:, :1], v[:, :1], at, "f32", "f32")
        assert torch.equal(memory, torch.ones_like(memory))


def test_a_compiled_step(backend: Backend) -> None:
    """The write and attention in one graph; what is compiled sees it."""
    s = Shape(1, 1, 4, 2, 64, 64)
    caches = [[backend.put(empty_cache("q4_0", s, False)) for _ in range(2)] for _ in range(3)]
    put = [backend.put(t) for t in operands(s, torch.float32, False).values()]

    def step(keys: Tensor, values: Tensor, slot: Tensor) -> Tensor:
        q = ops.rope_append(
            *put, s.heads, s.kv_heads, keys, values, slot, "q4_0", "q4_0", interleaved=True
        )
        y: Tensor = ops.attention(q, keys, values, "q4_0", "q4_0", slot[0] + 1)
        return y

    torch._dynamo.reset()
    steps = (
        step,
        torch.compile(step, backend="eager", fullgraph=True),
        torch.compile(step, backend="aot_eager", fullgraph=True),
    )
    for slot in (0, 1, 5):
        at = backend.put(torch.tensor([slot]))
        y, *others = [f(*cache, at) for f, cache in zip(steps, caches, strict=True)]
        assert all(torch.equal(y, other) for other in others)
    for cache in caches[1:]:
        assert all(map(torch.equal, cache, caches[0]))

"""Random calls of attention: every size, trait and layout, the same for a seed in every process."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from attention_oracle import Traits, attention
from backends import Backend
from cache_cases import CACHE_FORMATS, Call, Layer, layer
from inputs import activations, generator, random_weight
from oracle import FORMATS, Halved, check
from plan_cases import stored
from torch import Tensor

from torch_metalmm import _C, formats

# Where the walks end: blocks that are decoded, parts, queries of a part, rows of a dot kernel.
LENGTHS = (0, 1, 2, 31, 63, 64, 65, 129, 255, 256, 257, 300, 513, 700)
QUERIES = (1, 1, 1, 2, 3, 4, 8, 15, 16, 17, 40)
DIMS = (64, 80, 96, 112, 128, 192, 256)
WINDOWS = (0, 0, 0, 0, 1, 5, 70, 300, 2**63 - 1)
DTYPE_NAMES = {dtype: name for name, dtype in formats.DTYPES.items()}
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)


def has_kernels(c: Call) -> bool:
    """Whether shaders have this cache: one format that they store, or such values and f16 keys."""
    return c.cache.format_v in stored() and c.cache.format_k in (c.cache.format_v, "f16")


def has_sdpa(c: Call) -> bool:
    """Whether torch's scaled_dot_product_attention has an argument for each trait."""
    mask = c.traits.mask
    is_added = mask is not None and mask.dtype != torch.bool
    return c.traits.softcap == 0 and c.traits.sinks is None and not is_added


def halved(c: Call, backend: Backend, strategy: str | None) -> Halved:
    """What the engine rounds, by its own choice of a strategy: as attention_oracle.py has it."""
    if strategy == "torch" or c.q.numel() == 0:
        return False
    if strategy == "sdpa":
        return c.q.dtype
    t, mask, dtype = c.traits, c.traits.mask, DTYPE_NAMES[c.q.dtype]
    of_cache = (c.cache.format_k, c.cache.format_v)
    to_decode = next((f for f in of_cache if f != dtype), dtype)
    sizes = {"batch": len(c.q), "heads": c.q.shape[1], "kv_heads": c.cache.keys.shape[1]}
    sizes |= {"queries": c.q.shape[2], "window": t.window, "softcap": t.softcap}
    sizes |= {"causal": t.causal, "sinks": t.sinks is not None}
    sizes |= {"bool_mask": mask is not None and mask.dtype == torch.bool}
    sizes |= {"float_mask": mask is not None and mask.dtype != torch.bool}
    if not backend.chip():
        return False
    slots = c.cache.keys.shape[2] if mask is None else min(c.cache.keys.shape[2], mask.shape[3])
    sizes |= {"filled": is_filled(c)}
    asked = {"n": slots, "k": c.q.shape[3], "dtype": dtype, "chip": backend.chip()}
    asked |= {"format": to_decode if to_decode in stored() else "q8_0"}  # has no say in the choice
    plan = _C.plan("attention", **asked, attention=sizes, strategy=strategy)
    if plan["sdpa"]:
        return c.q.dtype
    tiles = has_kernels(c) and plan["passes"][0]["kernel"].startswith("attention_tile")
    return tiles and c.q.dtype == torch.float16


def is_filled(c: Call) -> bool:
    """Whether attend() gives no length: half of the calls whose slots are all filled."""
    return c.cache.length == c.cache.keys.shape[2] and c.cache.length % 2 == 1


def attend(c: Call, backend: Backend, strategy: str | None = None) -> Tensor:
    """The result of the op, each tensor in memory like that of the call."""
    put, cache = backend.put_view, c.cache
    y: Tensor = torch.ops.metalmm.attention(
        put(c.q),
        put(cache.keys),
        put(cache.values),
        cache.format_k,
        cache.format_v,
        None if is_filled(c) else backend.put(torch.tensor(cache.length)),
        **c.traits.kwargs(put),
        strategy=strategy,
    )
    return y


def check_call(c: Call, backend: Backend, what: str, strategy: str | None = None) -> float:
    """AssertionError, or the largest error / bound of that call.

    The strides of the result are a new tensor's, and each sequence of a batch is to the bit what it
    is alone, but where torch's products compute, which promise no bits.
    """
    what += f": {described(c)}"
    y = attend(c, backend, strategy)
    assert y.dtype == c.q.dtype and y.stride() == torch.empty(y.shape).stride(), what
    rounded = halved(c, backend, strategy)
    want = attention(c.q, c.cache.k, c.cache.v, c.traits, rounded)
    worst = check(y, want.store(c.q.dtype), what)
    is_torchs = isinstance(rounded, torch.dtype) or strategy == "torch"
    if len(c.q) > 1 and not is_torchs and (not backend.chip() or has_kernels(c)):
        for i in range(len(c.q)):
            alone = attend(sequence(c, i), backend, strategy)
            assert torch.equal(alone, y[i : i + 1]), f"{what}, sequence {i}"
    return worst


def described(c: Call) -> str:
    cache, t = c.cache, c.traits
    mask = None if t.mask is None else (t.mask.dtype, *t.mask.shape)
    sinks = None if t.sinks is None else t.sinks.dtype
    return (
        f"q {c.q.dtype} {list(c.q.shape)}, keys {list(cache.keys.shape)} {cache.keys.stride()}, "
        f"{cache.format_k} {cache.format_v}, length {cache.length}, mask {mask}, sinks {sinks}, "
        f"scale {t.scale}, softcap {t.softcap}, window {t.window}, causal {t.causal}"
    )


def sequence(c: Call, i: int) -> Call:
    """The call of the sequence i alone."""

    def of(t: Tensor) -> Tensor:
        return t[i : i + 1] if len(t) > 1 else t

    cache = c.cache
    alone = replace(
        cache, keys=of(cache.keys), values=of(cache.values), k=of(cache.k), v=of(cache.v)
    )
    mask = None if c.traits.mask is None else of(c.traits.mask)
    return Call(of(c.q), alone, replace(c.traits, mask=mask))


def random_call(seed: int, most: int) -> Call:
    r = random.Random(seed)
    dim = r.choice(DIMS)
    cache = random_cache(r, dim, seed, most)
    batch, kv_heads = cache.keys.shape[:2]
    heads = kv_heads * r.choice((1, 2, 3, 5, 8))
    queries = r.choice((r.choice(QUERIES), r.randint(1, 40)))
    q = activations(batch, heads, queries, dim, seed=(seed, "q")) * r.choice((0.1, 1, 4))
    sinks = activations(heads, dtype=r.choice(DTYPES), seed=(seed, "s"))
    traits = Traits(
        mask=mask_of((batch, heads, queries, cache.length), r, seed),
        scale=r.choice((None, None, 0.3)),
        softcap=r.choice((0.0, 0.0, 0.0, 7.5, 50.0)),
        window=r.choice(WINDOWS),
        sinks=sinks if r.random() < 0.25 else None,
        causal=r.random() < 0.8,
    )
    return Call(laid_out(q.to(r.choice(DTYPES)), r), cache, traits)


def random_cache(r: random.Random, dim: int, seed: int, most: int) -> Layer:
    """Keys and values of those formats that a cache most often has; at times of any."""
    names = CACHE_FORMATS if r.random() < 0.8 else FORMATS
    whole = [n for n in names if dim % formats.get(n).block_values == 0]
    format_k = r.choice(whole)
    format_v = r.choice((format_k, r.choice(whole)))  # shaders are for one format
    length = r.choice((r.choice(LENGTHS), r.randint(0, 700))) % (most + 1)
    capacity = length + r.choice((0, 1, 9))
    batch, kv_heads = r.choice((1, 1, 2, 3)), r.choice((1, 2))
    out = layer((batch, kv_heads, capacity, dim), length, (format_k, format_v), seed, drawn)
    out.keys, out.values = laid_out(out.keys, r), laid_out(out.values, r)
    if r.random() < 0.1:  # a prompt that all sequences share
        for name in ("keys", "values", "k", "v"):
            t = getattr(out, name)
            setattr(out, name, t[:1].expand(t.shape))
    return out


def drawn(name: str, rows: Tensor) -> Tensor:
    """Packed rows of the format: those of a cache quantized, others of random bytes."""
    if name in CACHE_FORMATS:
        return formats.get(name).quantize(rows)
    return random_weight(name, *rows.shape, seed=len(rows))


def laid_out(t: Tensor, r: random.Random) -> Tensor:
    """t [B, H, T, D] in other memory, beside NaN or bytes that decode to it."""
    kind = r.choice(("plain", "plain", "rows first", "part", "ones"))
    if kind == "rows first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    b, h, n, d = t.shape
    nothing = 255 if t.dtype == torch.uint8 else torch.nan
    if kind == "part":
        memory = torch.full((b + 1, 2 * h, n + 4, d + r.choice((0, 1, 16))), nothing, dtype=t.dtype)
        memory[1:, ::2, 3 : 3 + n, :d] = t
        return memory[1:, ::2, 3 : 3 + n, :d]
    if kind == "ones" and t.numel():  # any stride where a dimension has one element
        strides = [s if m > 1 else 7 for m, s in zip(t.shape, t.stride(), strict=True)]
        return t.contiguous().as_strided(t.shape, strides)
    return t


def mask_of(sizes: tuple[int, int, int, int], r: random.Random, seed: object) -> Tensor | None:
    """A mask [B or 1, H or 1, S, T or more], of one kind, with empty rows; or none."""
    batch, heads, queries, slots = sizes
    kind = r.choice(("none", "none", "bool", "added", "lowest"))
    shape = (r.choice((1, batch)), r.choice((1, heads)), queries, slots + r.choice((0, 5)))
    g = generator("mask", seed)
    mask = torch.rand(shape, generator=g) < r.choice((0.05, 0.5, 0.95))
    if kind == "none":
        return None
    if kind == "added":
        mask = torch.randn(shape, generator=g).masked_fill(~mask, -torch.inf).to(r.choice(DTYPES))
    elif kind == "lowest":
        mask = torch.zeros(shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if r.random() < 0.2:
        mask = mask.mT.contiguous().mT
    elif r.random() < 0.2:
        mask = mask[:1].expand(batch, -1, -1, -1)
    return mask

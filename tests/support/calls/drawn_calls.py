"""A random call of every op of torch.ops.metalmm, known by its number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import wanted
from backends import CPU
from cache_cases import as_stored
from drawing import ACTIVATIONS, Call, Draw, laid_out
from random_calls import given_of, random_call
from torch import Tensor

from torch_metalmm import formats

Given = dict[str, Any]


def sized(d: Draw, *shape: int) -> Tensor:
    """Rows of sizes from 2^-8 to 2^8, at times one of zeros."""
    sizes = [d.of(0.0, *(2.0**i for i in range(-8, 9))) for _ in range(math.prod(shape[:-1]))]
    return d.x(*shape, scale=torch.tensor(sizes).view(*shape[:-1], 1))


def eps_and_offset(d: Draw, has_weight: bool) -> Given:
    return {"eps": d.of(1e-5, 0.5), "offset": d.of(0.0, 1.0) if has_weight else 0.0}


def addends(d: Draw, lead: tuple[int, ...], n: int) -> Given:
    bias = d.maybe(lambda: d.x(n, dtype=d.any_dtype()))
    return {
        "bias": bias,
        "residual": d.maybe(lambda: d.x(*lead, n, dtype=d.any_dtype(), scale=100.0)),
    }


def linear(d: Draw) -> Given:
    lead, n, k = d.leading(d.rows()), d.upto(40, 0), d.k(empty=True)
    given = {"x": d.x(*lead, k), "weight": d.packed(n, k), "format": d.written(d.name)}
    forced = d.force("linear")
    return given | addends(d, lead, n) | {"strategy": forced and d.written(forced)}


def linear_input_grad(d: Draw) -> Given:
    n, k = d.upto(40, 0), d.k(empty=True)
    given = {"grad": d.x(*d.leading(d.rows()), n), "weight": d.packed(n, k), "format": d.name}
    return given | {"in_features": k}


def norm_linear(d: Draw) -> Given:
    lead, n, k = d.leading(d.rows()), d.upto(40), d.k()
    weight = d.maybe(lambda: d.x(k), 0.7)
    given = {"x": sized(d, *lead, k), "norm_weight": weight, "weight": d.packed(n, k)}
    given |= eps_and_offset(d, weight is not None) | {"format": d.name}
    return given | addends(d, lead, n)


def size_for(w: Tensor, name: str, k: int, of: float) -> float:
    """A power of two, by which products of normal x are about as large as `of`."""
    return 2.0 ** round(math.log2(of / float(wanted.decoded(w, name, k).norm(dim=-1).mean())))


def swiglu(d: Draw) -> Given:
    m, n, k = d.rows(), d.upto(40), d.k()
    names, lead = (d.name, d.of(d.name, d.name, "f32")), d.leading(m)
    gate, up = (d.packed(n, k, name=name) for name in names)
    size = size_for(gate, d.name, k, 4)
    given = {"gate_weight": gate, "up_weight": up, "activation": d.of(*ACTIVATIONS)}
    given |= {"format_gate": names[0], "format_up": names[1]}
    if d.r.random() < 0.5:
        return given | {"x": d.x(*lead, k, scale=size)}
    norm = {"norm_weight": d.x(k, scale=size), "eps": 1e-5, "offset": size}
    return given | norm | {"x": sized(d, *lead, k)}


def swiglu_linear(d: Draw) -> Given:
    lead, n, k = d.leading(d.rows()), d.upto(40), d.k()
    given = {"gate": d.x(*lead, k, scale=4.0), "up": d.x(*lead, k), "weight": d.packed(n, k)}
    given |= {"format": d.name, "activation": d.of(*ACTIVATIONS)}
    return given | addends(d, lead, n)


def scaled(d: Draw, lead: tuple[int, ...]) -> Given:
    n, k = d.upto(40), d.k()
    c = d.maybe(lambda: d.x(*lead, n, dtype=d.any_dtype()))
    given = {"x": d.x(*lead, k), "weight": d.packed(n, k), "format": d.name, "c": c}
    given |= {"alpha": d.of(1.0, -1.5, 2.0**-10), "beta": 0.0 if c is None else d.of(1.0, -2.0, 0)}
    return given | {"strategy": d.force("linear")}


def rms_norm(d: Draw) -> Given:
    shape = (*d.leading(d.rows()), d.of(d.upto(70), d.upto(4 * d.most)))
    weight = d.maybe(lambda: d.x(shape[-1], dtype=d.any_dtype()), 0.7)
    given = {"x": sized(d, *shape), "weight": weight}
    return given | eps_and_offset(d, weight is not None) | {"residual": d.maybe(lambda: d.x(*shape))}


def add_rms_norm(d: Draw) -> Given:
    given = rms_norm(d)
    residual = d.x(*given["x"].shape, dtype=d.any_dtype())
    return given | {"residual": residual}


def heads_of(d: Draw, dim: int) -> tuple[Given, tuple[int, int, int]]:
    """The arguments of rope; sequences, heads of k and v, and positions."""
    batch, positions, heads, kv_heads = (d.upto(most) for most in (3, 5, 4, 3))
    rotated, apart = 2 * d.upto(dim // 2, 0), d.r.random() < 0.5
    angle = d.x(d.of(1, batch), positions, rotated, dtype=torch.float32, scale=3.0)
    kind = d.of(d.dtype, torch.float32)
    given: Given = {"cos": laid_out(angle.cos().to(kind), d.r), "heads": heads}
    given |= {"sin": laid_out(angle.sin().to(kind), d.r), "kv_heads": kv_heads}
    given["qkv"] = d.x(batch, positions, (heads + (2 - apart) * kv_heads) * dim)
    given["v"] = d.x(batch, positions, kv_heads * dim) if apart else None
    weights = {n: d.maybe(lambda: d.x(dim, dtype=d.any_dtype())) for n in ("q_norm", "k_norm")}
    if any(w is not None for w in weights.values()):
        given |= weights | {"eps": 1e-5, "offset": d.of(0.0, 1.0)}
    return given | {"interleaved": d.r.random() < 0.5}, (batch, kv_heads, positions)


def rope(d: Draw) -> Given:
    return heads_of(d, d.of(64, 48, 128, d.upto(160)))[0]


def caches(d: Draw, sizes: tuple[int, int, int], dim: int) -> Given:
    """Keys and values with bytes of no row, parts of larger ones; slots in any order."""
    batch, kv_heads, positions = sizes
    capacity = positions + d.upto(9, 0)
    given: Given = {"slots": torch.tensor(d.r.sample(range(capacity), positions))}
    stored = [n for n in formats.names() if formats.get(n).packs]
    whole = [n for n in stored if dim % formats.get(n).block_values == 0]
    format_k = d.name if d.name in whole else d.of(*whole)
    names = {"keys": format_k, "values": d.of(format_k, format_k, d.of(*whole))}
    for which, name in names.items():
        shape = (batch, 2 * kv_heads, capacity + 3, formats.get(name).row_bytes(dim))
        rows = as_stored(name, torch.full(shape, 17, dtype=torch.uint8))
        given[which] = d.of(rows[:, ::2, 2:-1], rows[:, :kv_heads, 3:].contiguous())
    return given | {"format_k": names["keys"], "format_v": names["values"]}


def rope_append(d: Draw) -> Given:
    dim = d.of(64, 128, 256, 96)
    given, sizes = heads_of(d, dim)
    return given | caches(d, sizes, dim)


def cache_append(d: Draw) -> Given:
    dim, sizes = d.of(64, 128, 256, 96), (d.upto(3), d.upto(3), d.upto(5))
    k, v = (d.x(*sizes, dim, scale=4.0) for _ in range(2))
    return caches(d, sizes, dim) | {"k": k, "v": v}


def attention(d: Draw) -> Given:
    return given_of(random_call(d.r.randrange(10**6), min(d.most, 700)))


def gated_delta(d: Draw) -> Given:
    """Gates of a real model; the state begins at 16 bytes or between, with gaps or without."""
    batch, positions, key_heads, group = (d.upto(3) for _ in range(4))
    dk, dv, heads = d.of(1, 20, 64, d.upto(256)), 4 * d.upto(33), key_heads * group
    gates = {n: d.x(batch, positions, heads, scale=s) for n, s in (("a", 6.0), ("b", 4.0))}
    kind = d.of(d.dtype, torch.float32)
    state = d.x(batch, heads, dk, dv, dtype=torch.float32).clone()
    wide = torch.ones(batch, heads + 1, dk, dv + 4)
    return gates | {
        "qkv": d.x(batch, positions, 2 * key_heads * dk + heads * dv),
        "a_log": d.x(heads, dtype=kind),
        "dt_bias": (d.x(heads, dtype=torch.float32) - 4).to(kind),
        "state": d.of(state, wide[:, 1:, :, 3:-1].copy_(state)),
        "eps": d.of(1e-6, 1e-3),
    }


def route(d: Draw) -> Given:
    """Of logits whose order no rounding changes."""
    while True:
        given = route_of(d)
        try:
            wanted.route(CPU, **given)
            return given
        except AssertionError:  # it might
            pass


def route_of(d: Draw) -> Given:
    """Logits 1 / 32 apart at least, exact in every dtype; of a product, normal ones."""
    groups, size, tokens = d.of(1, 1, 1, 4, 8), d.upto(32, 2), d.upto(9)
    experts, kept = groups * size, d.upto(groups)
    given: Given = {"top_k": d.upto(min(32, kept * size)), "scoring": d.of("softmax", "sigmoid")}
    given |= {"groups": groups, "kept_groups": kept, "group_best": d.of(1, 2)}
    given |= {"renormalise": d.r.random() < 0.5, "scale": d.of(1.0, -2.5)}
    given["bias"] = d.maybe(lambda: d.x(experts, dtype=torch.float32))
    given["choice_bias"] = d.maybe(lambda: d.x(experts, dtype=torch.float32, scale=0.25))
    if d.r.random() < 0.3:
        name = {v: k for k, v in formats.DTYPES.items()}[d.dtype]
        w = d.x(experts, 96)
        return given | {"x": d.x(tokens, 96), "weight": w, "format": name}
    order = d.x(tokens, experts, dtype=torch.float32).argsort(-1)
    return given | {"x": laid_out(((order - experts // 2) / 32).to(d.dtype), d.r)}


def decoding(d: Draw) -> Given:
    k = d.k(empty=True)
    is_affine = isinstance(formats.get(d.name), formats.Affine)  # two K may have a row's bytes
    given: Given = {"weight": d.packed(d.upto(20), k), "format": d.written(d.name)}
    given["in_features"] = k if is_affine else d.of(k, None)
    return given | {"dtype": d.of(d.dtype, d.dtype, None)}


def embedding(d: Draw) -> Given:
    given = decoding(d)
    shape = d.of((), (3,), (2, 3), (0,), (2, 3, 4))
    return given | {"ids": d.ids(*shape, below=len(given["weight"]))}


def quantize(d: Draw) -> Given:
    packs = d.name if formats.get(d.name).packs else "q4_0"
    k = d.k(packs)
    importance = d.maybe(lambda: d.x(k, dtype=torch.float32).abs())
    return {"w": d.x(d.upto(5, 0), k), "format": d.written(packs), "importance": importance}


def probe(d: Draw) -> Given:
    shape = d.of((d.upto(3000, 0),), (d.upto(5), d.upto(300)))
    return {"x": d.x(*shape), "x2": d.x(*shape), "op": d.of("add", "sub", "mul", "div", "dot")}


def chosen(d: Draw) -> tuple[tuple[int, int, int], Given]:
    """Experts, tokens and choices; the ids, at times one expert twice for a token."""
    experts = d.of(1, 2, 3, 5, 40)
    tokens, choices = d.of((1, 1), (1, 4), (2, 3), (3, 11), (19, 2), (40, 1), (0, 2), (3, 0))
    return (experts, tokens, choices), {"ids": d.ids(tokens, choices, below=experts)}


def expert_linear(d: Draw) -> Given:
    (experts, tokens, choices), given = chosen(d)
    n, k = d.upto(20), d.k()
    shape = d.of((tokens, k), (tokens, choices, k))
    given |= {"x": d.x(*shape), "weight": d.packed(experts, n, k), "format": d.name}
    given["bias"] = d.maybe(lambda: d.x(experts, n, dtype=d.any_dtype()))
    given["scores"] = d.maybe(lambda: d.x(tokens, choices, dtype=d.any_dtype()))
    op = "expert_linear" if given["scores"] is None else "expert_down"
    return given | {"strategy": d.force(op)}


def expert_swiglu(d: Draw) -> Given:
    (experts, tokens, choices), given = chosen(d)
    n, k, activation = d.upto(15), d.k(), d.of(*ACTIVATIONS, "swiglu_oai")
    w = d.packed(experts, 2 * n, k)
    x = d.x(*d.of((tokens, k), (tokens, choices, k)), scale=size_for(w, d.name, k, 2))
    given |= {"x": x, "format": d.name, "activation": activation, "strategy": d.force("expert_up")}
    given["bias"] = d.maybe(lambda: d.x(experts, 2 * n, dtype=d.any_dtype()))
    given |= {"limit": d.of(None, 1.25), "alpha": 1.702 if activation == "swiglu_oai" else 1.0}
    if d.r.random() < 0.3:
        gate, up = w.chunk(2, 1)
        return given | {"weight": gate, "up_weight": up}
    return given | {"weight": w, "interleaved": d.r.random() < 0.5}


def expert_input_grad(d: Draw) -> Given:
    (experts, tokens, choices), given = chosen(d)
    n, k = d.upto(20), d.k()
    given |= {"grad": d.x(tokens, choices, n), "weight": d.packed(experts, n, k)}
    return given | {"format": d.name, "in_features": k}


DRAWS: dict[str, Callable[[Draw], Given]] = {
    f.__name__: f
    for f in (
        *(linear, linear_input_grad, norm_linear, swiglu, swiglu_linear, rms_norm, add_rms_norm),
        *(rope, rope_append, cache_append, attention, gated_delta, route, embedding, quantize),
        *(probe, expert_linear, expert_swiglu, expert_input_grad),
    )
} | {
    "gemm": lambda d: scaled(d, (d.rows(),)),
    "gemv": lambda d: scaled(d, ()),
    "dequantize": decoding,
}


def drawn(op: str, number: int, **how: Any) -> Call:
    """The call of an op of that number. how: as Draw takes it."""
    return Call(op, DRAWS[op](Draw(op, number, **how)))


"""Calls of every op with operands that begin inside their storage, and what each must plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from cache_cases import as_stored
from plan_cases import stored
from torch import Tensor

from torch_metalmm import _C, formats

ops = torch.ops.metalmm
CHIP, CORES, N, K = "m1", 4, 37, 1024
SPLIT = "split_reduce"
PROBES = ("add", "sub", "mul", "div", "dot")


@dataclass(frozen=True)
class Call:
    """An op, its operands by slot, and the problem that it must plan.

    `before`: what the op plans before that, in order; `made`: operands of the last plan that the
    earlier passes make, {slot: number of the pass whose y it is}.
    """

    run: Callable[[], Any]
    operands: dict[str, Tensor]
    problem: dict[str, Any]
    before: tuple[Call, ...] = ()
    made: dict[str, int] = field(default_factory=dict)
    y_values: int | None = None  # of the last plan, where these are not the result
    gathered: tuple[str, ...] = ()  # slots of what torch's ops make before the last plan


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """x [m, k] that begins inside its storage, rows apart."""
    return torch.zeros(m + 1, k + 24, dtype=dtype)[1:, 8 : 8 + k]


def packed(name: str) -> Tensor:
    """Some rows of a larger table."""
    return torch.zeros(3 * N, formats.get(name).row_bytes(K), dtype=torch.uint8)[N : 2 * N]


def strides(x: Tensor, w: Tensor) -> dict[str, int]:
    return {"x_stride": x.stride(0) if len(x) > 1 else K, "w_stride": w.stride(0)}


def linear(name: str, strategy: str | None, m: int, dtype: torch.dtype) -> Call:
    x, w, bias = rows(m, K, dtype), packed(name), torch.zeros(N + 5, dtype=dtype)[5:]
    problem = {"m": m, "n": N, "k": K, "bias": True, "strategy": strategy, **strides(x, w)}
    run = lambda: ops.linear(x, w, bias, name, strategy)  # noqa: E731
    return Call(run, {"x": x, "weight": w, "bias": bias}, problem | {"format": name})


def swiglu(name: str, dtype: torch.dtype) -> Call:
    x, gate, up = rows(1, K, dtype), packed(name), packed(name)
    problem = {"op": "swiglu_up", "m": 1, "n": N, "k": K, "format": name, **strides(x, gate)}
    run = lambda: ops.swiglu(x, gate, up, name, name)  # noqa: E731
    operands = {"x": x, "weight": gate, "weight2": up}
    return Call(run, operands, problem | {"w2_stride": up.stride(0)})


def swiglu_rows(name: str, dtype: torch.dtype) -> Call:
    """A gated MLP of many rows: gate and up in f32, by the kernels of x's dtype, then act_mul."""
    x, gate, up = rows(3, K, dtype), packed(name), packed(name)
    run = lambda: ops.swiglu(x, gate, up, name, name)  # noqa: E731
    problem = {"m": 3, "n": N, "k": K, "format": name, "y_f32": True, **strides(x, gate)}
    before = tuple(Call(run, {"x": x, "weight": w}, problem) for w in (gate, up))
    return Call(run, {}, {"op": "act_mul", "n": 3 * N}, before, {"x": 0, "x2": 1})


def swiglu_linear(name: str, dtype: torch.dtype) -> Call:
    gate, up, w = rows(2, K, dtype), rows(2, K, dtype), packed(name)
    problem = {"op": "swiglu_down", "m": 2, "n": N, "k": K, "format": name, **strides(gate, w)}
    run = lambda: ops.swiglu_linear(gate, up, w, None, name)  # noqa: E731
    return Call(run, {"x": gate, "x2": up, "weight": w}, problem)


NORM = {"norm_weight": True, "eps": 0.5, "offset": 1.0}


def norm_linear(name: str, dtype: torch.dtype) -> Call:
    x, w, norm = rows(2, K, dtype), packed(name), rows(1, K, dtype)[0]
    residual = torch.zeros(5, N, dtype=dtype)[2:4]
    problem = {"m": 2, "n": N, "k": K, "c": True, "beta": 1.0, "norm": True, **strides(x, w)}
    run = lambda: ops.norm_linear(x, norm, 0.5, 1.0, w, None, name, residual)  # noqa: E731
    operands = {"x": x, "weight": w, "norm": norm, "c": residual}
    return Call(run, operands, problem | NORM | {"format": name})


def norm_linear_of_rows(name: str, dtype: torch.dtype) -> Call:
    """Of many rows: the norm, in x's dtype, then linear."""
    x, w, norm = rows(40, K, dtype), packed(name), rows(1, K, dtype)[0]
    first = {"op": "rms_norm", "m": 40, "k": K, "x_stride": x.stride(0)} | NORM
    problem = {"m": 40, "n": N, "k": K, "format": name, "w_stride": w.stride(0)}
    run = lambda: ops.norm_linear(x, norm, 0.5, 1.0, w, None, name)  # noqa: E731
    return Call(run, {"weight": w}, problem, (Call(run, {"x": x, "norm": norm}, first),), {"x": 0})


def swiglu_of_a_norm(name: str, dtype: torch.dtype) -> Call:
    call, norm = swiglu(name, dtype), rows(1, K, dtype)[0]
    x, gate, up = (call.operands[slot] for slot in ("x", "weight", "weight2"))
    run = lambda: ops.swiglu(x, gate, up, name, name, "relu2", norm, 0.5, 1.0)  # noqa: E731
    problem = call.problem | NORM | {"norm": True, "activation": "relu2"}
    return Call(run, call.operands | {"norm": norm}, problem)


def hadamard(_: str, dtype: torch.dtype) -> Call:
    x = rows(3, K, dtype).contiguous()
    return Call(lambda: ops.hadamard(x), {"x": x}, {"op": "hadamard", "n": x.numel()})


def rms_norm(_: str, dtype: torch.dtype) -> Call:
    x, norm, residual = rows(3, K, dtype), rows(1, K, dtype)[0], torch.zeros(3, K, dtype=dtype)
    problem = {"op": "rms_norm", "m": 3, "k": K, "c": True, "beta": 1.0, "x_stride": x.stride(0)}
    gate = torch.zeros(3, 2 * K, dtype=dtype)[:, K:]
    problem |= {"gate": True, "x2_stride": 2 * K}
    run = lambda: ops.rms_norm(x, norm, 0.5, 1.0, residual, gate)  # noqa: E731
    return Call(run, {"x": x, "norm": norm, "c": residual, "x2": gate}, problem | NORM)


def add_rms_norm(_: str, dtype: torch.dtype) -> Call:
    x, x2, norm = rows(3, K, dtype), torch.zeros(3, 2 * K, dtype=dtype)[:, K:], torch.ones(K)
    norm = norm.to(dtype)
    problem = {"op": "add_rms_norm", "m": 3, "k": K, "x_stride": x.stride(0), "x2_stride": 2 * K}
    run = lambda: ops.add_rms_norm(x, x2, norm, 0.5, 1.0)  # noqa: E731
    return Call(run, {"x": x, "x2": x2, "norm": norm}, problem | NORM)


def rope(_: str, dtype: torch.dtype) -> Call:
    """Two sequences of three positions; two heads of q, one of k and one of v, elsewhere."""
    qk, v = (torch.zeros(2, 3, n + 8, dtype=dtype)[..., :n] for n in (48, 16))
    cos, sin = (torch.zeros(1, 4, 8, dtype=dtype)[:, 1:] for _ in range(2))
    norm, norm2 = rows(1, 32, dtype)[0], rows(1, 16, dtype)[0]  # of all heads
    sizes = {"heads": 2, "kv_heads": 1, "rotated": 8, "positions": 3, "angle_rows": 3}
    traits = "q_norm", "k_norm", "whole_norms", "v_norm", "interleaved", "v_apart"
    sizes |= dict.fromkeys(traits, True)
    problem = {"op": "rope", "m": 6, "k": 16, "rope": sizes, "eps": 0.5, "offset": 1.0}
    run = lambda: ops.rope(qk, cos, sin, 2, 1, v, norm, norm2, 0.5, 1.0, True, v_norm=True)  # noqa: E731
    operands = {"x": qk.view(6, -1), "x2": v.view(6, -1), "cos": cos, "sin": sin}
    operands |= {"norm": norm, "norm2": norm2}
    return Call(run, operands, problem | {"x_stride": 56, "x2_stride": 24})


def rope_append(name: str, dtype: torch.dtype) -> Call:
    """Two sequences of three positions into a part of a larger cache, values rotated."""
    name = name if name in stored() else "q8_0"
    is_packed = name not in formats.DTYPES
    qkv = torch.zeros(2, 3, 136, dtype=dtype)[..., :128]
    cos, sin = (torch.zeros(1, 4, 8, dtype=dtype)[:, 1:] for _ in range(2))
    row = formats.get(name).row_bytes(32)
    rows = (torch.zeros(3, 2, 9, row, dtype=torch.uint8) for _ in range(2))
    keys, values = (as_stored(name, t)[1:, 1:, 2:7] for t in rows)
    slots = torch.arange(9)[3:6] - 3
    sizes = {"heads": 2, "kv_heads": 1, "rotated": 8, "positions": 3, "angle_rows": 3}
    problem = {"op": "rope_append", "m": 6, "n": 5, "k": 32, "rope": sizes, "format": name}
    strides = dict.fromkeys(("sequence_stride", "sequence2_stride"), 18 * row)
    strides |= {"head_stride": 0, "head2_stride": 0, "rotated_values": is_packed}
    problem |= {"append": strides, "x_stride": 136, "w2_stride": row}
    run = lambda: ops.rope_append(  # noqa: E731
        qkv, cos, sin, 2, 1, keys, values, slots, name, name + "_rotated" * is_packed
    )
    operands = {"x": qkv.view(6, -1), "cos": cos, "sin": sin, "ids": slots}
    return Call(run, operands | {"weight": keys, "weight2": values}, problem | {"w_stride": row})


def causal_conv(_: str, dtype: torch.dtype) -> Call:
    """Two sequences of three positions; a weight in f32 and no bias."""
    x, weight = torch.zeros(2, 3, 24, dtype=dtype)[..., 8:20], torch.zeros(14, 4)[2:]
    state = torch.zeros(3, 12, 4, dtype=dtype)[1:]
    sizes = {"positions": 3, "width": 4, "silu": True, "float_weight": dtype != torch.float32}
    problem = {"op": "causal_conv", "m": 6, "n": 12, "k": 4, "conv": sizes, "x_stride": 24}
    run = lambda: ops.causal_conv(x, weight, None, state, "silu")  # noqa: E731
    return Call(run, {"x": x, "norm": weight, "y2": state}, problem)


def gated_delta(_: str, dtype: torch.dtype) -> Call:
    """Two sequences of three positions; a head of q and k, two of v, of a merged projection."""
    x = torch.zeros(2, 3, 104, dtype=dtype)
    qkv, a, b = x[..., 8:72], x[..., 80:82], x[..., 82:84]
    a_log, dt_bias = torch.zeros(5)[3:], torch.zeros(7)[5:]
    state = torch.zeros(3, 2, 16, 16)[1:]
    sizes = {"heads": 2, "key_heads": 1, "positions": 3, "float_heads": dtype != torch.float32}
    problem = {"op": "gated_delta", "m": 6, "n": 16, "k": 16, "delta": sizes, "eps": 0.5}
    run = lambda: ops.gated_delta(qkv, a, b, a_log, dt_bias, state, 0.5)  # noqa: E731
    operands = {"x": qkv, "x2": a, "c": b, "norm": a_log, "norm2": dt_bias, "y2": state}
    return Call(run, operands, problem | dict.fromkeys(("x_stride", "x2_stride", "y_stride"), 104))


def ssm_scan(_: str, dtype: torch.dtype) -> Call:
    """Two sequences of three positions; two heads of x, one group, and a gate, of a merged
    projection."""
    x = torch.zeros(2, 3, 104, dtype=dtype)
    gate, xbc, dt = x[..., 8:24], x[..., 24:72], x[..., 80:82]
    a_log, dt_bias, d = torch.zeros(5)[3:], torch.zeros(7)[5:], torch.zeros(9)[7:]
    state = torch.zeros(3, 2, 8, 16)[1:]
    sizes = {"heads": 2, "groups": 1, "positions": 3, "float_heads": dtype != torch.float32}
    sizes |= {"dt_min": 0.5, "dt_max": 1.5}
    problem = {"op": "ssm_scan", "m": 6, "n": 8, "k": 16, "ssm": sizes, "gate": True}
    run = lambda: ops.ssm_scan(xbc, dt, a_log, dt_bias, d, state, gate, 0.5, 1.5)  # noqa: E731
    operands = {"x": xbc, "x2": dt, "c": gate, "norm": a_log, "norm2": dt_bias, "bias": d}
    problem |= dict.fromkeys(("x_stride", "x2_stride", "y_stride"), 104)
    return Call(run, operands | {"y2": state}, problem)


def rope_tables(_: str, dtype: torch.dtype) -> Call:
    """Two sequences of three positions of three axes, four frequencies."""
    positions, freq = torch.zeros(4, 2, 3, dtype=torch.long)[1:], torch.zeros(7)[3:]
    axes = torch.zeros(6, dtype=torch.long)[2:]
    sizes = {"rows": 3, "twice": True, "axes": True}
    problem = {"op": "rope_tables", "m": 6, "k": 4, "tables": sizes, "alpha": 2.0}
    run = lambda: ops.rope_tables(positions, freq, axes, scale=2.0, dtype=dtype)  # noqa: E731
    return Call(run, {"ids": positions, "norm": freq, "x2": axes}, problem)


def route(_: str, dtype: torch.dtype) -> Call:
    """Three tokens, 2 of 8 experts in 4 groups."""
    x, bias, choice = torch.zeros(3, 24, dtype=dtype)[:, 8:16], torch.zeros(9)[1:], torch.zeros(8)
    shared, sizes = torch.zeros(5, 1)[2:], {"groups": 4, "kept_groups": 2, "group_best": 1}
    run = lambda: ops.route(  # noqa: E731
        x,
        2,
        None,
        bias,
        choice_bias=choice,
        shared=shared,
        scoring="sigmoid",
        renormalise=True,
        scale=0.5,
        **sizes,
    )
    flags = ("sigmoid", "renormalise", "bias", "choice_bias", "shared")
    given = sizes | dict.fromkeys(flags, True)
    problem = {"op": "route", "m": 3, "n": 8, "k": 2, "x_stride": 24, "alpha": 0.5, "route": given}
    return Call(run, {"x": x, "bias": bias, "x2": choice, "c": shared}, problem)


def route_of_rows(name: str, dtype: torch.dtype) -> Call:
    """Three tokens, 2 of N - 1 experts: the row of a shared one is read with those of W."""
    x, w = rows(3, K, dtype), packed(name)
    product = {"m": 3, "n": N, "k": K, "format": name, "y_f32": True, **strides(x, w)}
    shared = {"shared_weight": w[-1:], "shared_format": name}
    run = lambda: ops.route(x, 2, w[:-1], None, name, **shared)  # noqa: E731
    before = (Call(run, {"x": x, "weight": w}, product, y_values=3 * N),)
    problem = {"op": "route", "m": 3, "n": N - 1, "k": 2, "route": {"shared": True}}
    problem |= {"dtype": "f32", "x_stride": N, "y_stride": N}
    return Call(run, {}, problem, before, gathered=("x", "c"))


def attention(name: str, dtype: torch.dtype, queries: int, filled: bool = False) -> Call:
    """Two sequences, 4 heads of q for 2 of keys, a part of a larger cache; filled: no length."""
    name = name if name in stored() else "q8_0"
    q = torch.zeros(3, 4, queries, 32, dtype=dtype)[1:]
    row = formats.get(name).row_bytes(32)
    cache = [torch.zeros(3, 3, 90, row, dtype=torch.uint8) for _ in range(2)]
    keys, values = (as_stored(name, t)[1:, 1:, 2:86] for t in cache)
    length, mask = torch.arange(84)[80], torch.ones(2, 1, queries, 100, dtype=torch.bool)[..., 3:]
    sinks = torch.zeros(9, dtype=dtype)[5:]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": queries, "bool_mask": True}
    for which in ("", "2"):
        sizes |= {f"head{which}_stride": 90 * row, f"sequence{which}_stride": 270 * row}
    sizes |= {"window": 70, "sinks": True}
    sizes |= {"mask_stride": 100, "mask_sequence_stride": 100 * queries, "scale": 0.5}
    sizes |= {"filled": filled}
    if queries == 1:
        sizes["mask_stride"] = 0
    problem = {"op": "attention", "n": 84, "k": 32, "format": name, "attention": sizes}
    run = lambda: ops.attention(  # noqa: E731
        q,
        keys,
        values,
        name,
        name,
        None if filled else length,
        mask=mask,
        scale=0.5,
        window=70,
        sinks=sinks,
    )
    operands = {"x": q, "weight": keys, "weight2": values, "c": mask, "bias": sinks}
    operands |= {} if filled else {"ids": length}
    return Call(run, operands, problem | {"w_stride": row, "w2_stride": row})


def experts(name: str, strategy: str, dtype: torch.dtype) -> Call:
    """Two tokens of two choices, of a part of a larger tensor of experts."""
    row = formats.get(name).row_bytes(K)
    w = torch.zeros(4, N + 3, row, dtype=torch.uint8)[1:, :N]
    x, ids = rows(2, K, dtype), torch.zeros(6, dtype=torch.int64)[2:].view(2, 2)
    sizes: dict[str, Any] = {"experts": 3, "sharing": 2, "stride": w.stride(0)}
    problem = {"n": N, "k": K, "format": name, "w_stride": row, "x_stride": x.stride(0)}
    if strategy == "expert_gemm":
        sizes |= {"tile_rows": 8}
        problem |= {"op": "expert_tiles", "m": 24, "y_f32": True, "experts": sizes}
        run = lambda: ops.expert_linear(x, w, ids, None, name, strategy=strategy)  # noqa: E731
        del problem["x_stride"]
        return Call(run, {"weight": w}, problem, y_values=24 * N, gathered=("x", "ids"))
    if strategy == "expert_up":
        gate, up = w[:, : N // 2], w[:, N // 2 : N // 2 * 2]
        bias = torch.zeros(7, N // 2 * 2, dtype=dtype)[4:]
        sizes |= {"stride2": w.stride(0), "limit": 7.0, "is_oai": True, "alpha": 1.5}
        problem |= {"op": "expert_up", "m": 4, "n": N // 2, "w2_stride": row}
        both, how = w[:, : N // 2 * 2], {"limit": 7.0, "alpha": 1.5}
        run = lambda: ops.expert_swiglu(x, both, ids, bias, name, "swiglu_oai", **how)  # noqa: E731
        operands = {"x": x, "weight": gate, "weight2": up, "ids": ids, "bias": bias}
        return Call(run, operands, problem | {"experts": sizes, "bias": True})
    bias, operands = torch.zeros(7, N, dtype=dtype)[4:], {"x": x, "weight": w, "ids": ids}
    scores = torch.zeros(3, 2, dtype=dtype)[1:] if strategy == "expert_down" else None
    added = None
    problem |= {"op": "expert_linear", "m": 4}
    if scores is not None:
        added = torch.zeros(5, N, dtype=dtype)[3:]
        operands |= {"x2": scores, "c": added}
        sizes |= {"choices": 2, "float_scores": dtype == torch.float32}
        problem |= {"op": "expert_down", "m": 2, "c": True, "beta": 1.0}
    run = lambda: ops.expert_linear(x, w, ids, bias, name, scores, residual=added)  # noqa: E731
    return Call(run, operands | {"bias": bias}, problem | {"experts": sizes, "bias": True})


EXPERTS = ("expert_gemv", "expert_down", "expert_up", "expert_gemm")


def gemm(name: str, dtype: torch.dtype) -> Call:
    x, w, c = rows(3, K, dtype), packed(name), torch.zeros(5, N, dtype=dtype)[2:]
    problem = {"m": 3, "n": N, "k": K, "c": True, "alpha": 0.5, "beta": 2.0, **strides(x, w)}
    run = lambda: ops.gemm(x, w, name, c, 0.5, 2.0)  # noqa: E731
    return Call(run, {"x": x, "weight": w, "c": c}, problem | {"format": name})


def embedding(name: str, dtype: torch.dtype) -> Call:
    ids, w, scale = torch.arange(9)[3:], packed(name), torch.zeros(9)[5]
    problem = {"op": "embedding", "m": 6, "n": N, "k": K, "format": name, "w_stride": w.stride(0)}
    problem |= {"scale": True, "float_scale": dtype != torch.float32}
    run = lambda: ops.embedding(ids, w, name, K, dtype=dtype, scale=scale)  # noqa: E731
    return Call(run, {"ids": ids, "weight": w, "norm": scale}, problem)


def dequantize(name: str, dtype: torch.dtype) -> Call:
    w = packed(name)
    problem = {"op": "dequantize", "n": N, "k": K, "format": name, "w_stride": w.stride(0)}
    return Call(lambda: ops.dequantize(w, name, K, dtype=dtype), {"weight": w}, problem)


def probe(op: str, dtype: torch.dtype) -> Call:
    x, x2 = rows(1, K, dtype)[0], rows(1, K, dtype)[0]
    size = {"k" if op == "dot" else "n": K}
    return Call(lambda: ops.probe(x, x2, op), {"x": x, "x2": x2}, {"op": op, **size})


# dense: test_mps_dense.py
FORCED = [s for s in _C.strategies("linear") if s not in (SPLIT, "dense")]
CALLS: dict[str, Callable[[str, torch.dtype], Call]] = {
    **{s: lambda f, t, s=s: linear(f, s, 3, t) for s in FORCED},
    **{f"m={m}": lambda f, t, m=m: linear(f, None, m, t) for m in (1, 2, 40, 300)},
    SPLIT: lambda f, t: linear(f, SPLIT, 2, t),
    "swiglu_up": swiglu,
    "swiglu_down": swiglu_linear,
    "gemm_small of 20 rows": lambda f, t: linear(f, "gemm_small", 20, t),
    "act_mul": swiglu_rows,
    "norm_linear": norm_linear,
    "norm_linear in two passes": norm_linear_of_rows,
    "swiglu of a norm": swiglu_of_a_norm,
    "hadamard": hadamard,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rope": rope,
    "rope_append": rope_append,
    "rope_tables": rope_tables,
    "route": route,
    "route of rows": route_of_rows,
    "causal_conv": causal_conv,
    "gated_delta": gated_delta,
    "ssm_scan": ssm_scan,
    "attention_split": lambda f, t: attention(f, t, 1),
    "attention_tile": lambda f, t: attention(f, t, 40),
    **{f"{m} queries, no length": lambda f, t, m=m: attention(f, t, m, True) for m in (1, 40)},
    **{s: lambda f, t, s=s: experts(f, s, t) for s in EXPERTS},
    "gemm op": gemm,
    "embedding": embedding,
    "dequantize": dequantize,
    **{op: lambda _, t, op=op: probe(op, t) for op in PROBES},
}

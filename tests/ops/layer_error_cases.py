"""Bad calls of the ops between the matrix products, as error_cases.py has them for the others."""

from __future__ import annotations

import torch
from error_cases import Case, bad, linear, swiglu, swiglu_linear

ops = torch.ops.metalmm


norm = bad(
    ops.norm_linear,
    lambda t: dict(
        x=t.x, norm_weight=t.x[0], eps=1e-5, offset=0.0, weight=t.w, bias=None, format="q4_0",
        residual=t.c,
    ),
)  # fmt: skip
rms_norm = bad(ops.rms_norm, lambda t: dict(x=t.x, weight=None, eps=1e-5))
add_rms_norm = bad(ops.add_rms_norm, lambda t: dict(x=t.x, residual=t.x, weight=None, eps=1e-5))
# 2 heads of q, one of k and one of v, 16 values each.
rope = bad(
    ops.rope,
    lambda t: dict(
        qkv=t.x[None], cos=t.x[None, :, :8], sin=t.x[None, :, 8:16], heads=2, kv_heads=1,
        q_norm=t.x[0, :16], eps=1e-5,
    ),
)  # fmt: skip
# 3 positions of 5 channels, 4 taps.
conv = bad(
    ops.causal_conv,
    lambda t: dict(
        x=t.c[None], weight=t.dense[:, :4], bias=None, activation="silu",
        state=t.dense[:, :4].to(t.c.dtype)[None].clone(),
    ),
)  # fmt: skip
# 3 positions, 2 heads of 16 values: a head of q and k, and 2 of v; or 2 heads of x, b and c.
STATE = (1, 2, 8, 16)
delta = bad(
    ops.gated_delta,
    lambda t: dict(
        qkv=t.x[None], a=t.c[None, :, :2], b=t.c[None, :, 2:4], a_log=t.bias[:2],
        dt_bias=t.bias[2:4], state=t.dense[:4].reshape(STATE).repeat(1, 1, 2, 1),
    ),
)  # fmt: skip
scan = bad(
    ops.ssm_scan,
    lambda t: dict(
        xbc=t.x[None], dt=t.c[None, :, :2], a_log=t.bias[:2], dt_bias=t.bias[2:4], d=t.bias[1:3],
        state=t.dense[:4].reshape(STATE).repeat(1, 1, 2, 1),
    ),
)  # fmt: skip
tables = bad(ops.rope_tables, lambda t: dict(positions=t.ids.view(1, -1), inv_freq=t.dense[0]))
hadamard = bad(ops.hadamard, lambda t: dict(x=t.x))
# 3 tokens to 2 of 64 experts in 4 groups.
route = bad(ops.route, lambda t: dict(x=t.x, top_k=2, groups=4, kept_groups=2))


LAYER_CASES = {
    "hadamard rows": Case(hadamard(x=lambda t: t.x[:, :48]), "x", "48 values", "multiple of 32"),
    "hadamard dtype": Case(hadamard(x=lambda t: t.x.int()), "x", "int|Int", "float32"),
    "route x": Case(route(x=lambda t: t.x[None]), "x", r"\[1, 3, 64\]", r"\[T, E\]"),
    "route weight": Case(
        route(weight=lambda t: t.w, format="q8_0"), "weight", r"\[5, 36\]", "q8_0|68"
    ),
    "route bias": Case(route(bias=lambda t: t.bias), "bias", r"\[5\]", r"\[64\]"),
    "route choice_bias": Case(route(choice_bias=lambda t: t.bias), "choice_bias", r"\[5\]", "64"),
    "route scoring": Case(route(scoring="relu"), "scoring", "relu", "softmax, sigmoid"),
    "route top_k": Case(route(top_k=33), "top_k", "33", "1 to 32, of 32 experts"),
    "route groups": Case(route(groups=5), "groups", "5", "divide the 64"),
    "route kept_groups": Case(route(kept_groups=5), "kept_groups", "5", "1 to the 4"),
    "route group_best": Case(route(group_best=3), "group_best", "3", "1, or 2"),
    "route shared": Case(route(shared=lambda t: t.c), "shared", r"\[3, 5\]", r"\[3, 1\]"),
    "route shared top_k": Case(
        route(shared=lambda t: t.c[:, :1], top_k=32), "top_k", "32", "1 to 31"
    ),
    "route shared_weight": Case(
        route(weight=lambda t: t.dense, shared_weight=lambda t: t.dense, groups=1, kept_groups=1),
        *("shared_weight", "5", "1"),
    ),
    "route shared_weight format": Case(
        route(
            **{"weight": lambda t: t.dense, "shared_weight": lambda t: t.w, "groups": 1},
            **{"kept_groups": 1, "shared_format": "q8_0"},
        ),
        *("shared_weight", r"\[5, 36\]", "q8_0|68"),
    ),
    "route shared_weight of logits": Case(
        route(shared_weight=lambda t: t.dense[:1]), "shared_weight", "no weight", "logits"
    ),
    "tables positions": Case(
        tables(positions=lambda t: t.ids.int()[None]), "positions", "int|Int", "int64"
    ),
    "tables inv_freq": Case(
        tables(inv_freq=lambda t: t.dense[:2]), "inv_freq", r"\[2, 64\]", r"\[F\]"
    ),
    "tables axes": Case(
        tables(axes=lambda t: t.ids, positions=lambda t: t.ids.view(1, 1, -1)),
        "axes",
        r"\[2\]",
        r"\[64\]",
    ),
    "tables axes dims": Case(
        tables(axes=lambda t: t.ids), "positions", r"\[1, 2\]", r"\[A, B, S\]"
    ),
    "tables interleaved": Case(
        tables(twice=False, interleaved=True), "interleaved", "True", "twice"
    ),
    "route scale": Case(route(scale=1e39), "scale", r"1e\+39", "f32|finite"),
    "conv x": Case(conv(x=lambda t: t.c), "x", r"\[3, 5\]", r"\[B, S, C\]"),
    "conv x dtype": Case(conv(x=lambda t: t.c[None].int()), "x", "int|Int", "float32"),
    "conv taps": Case(conv(weight=lambda t: t.dense[:, :9]), "weight", r"\[5, 9\]", "1 to 8"),
    "conv weight": Case(conv(weight=lambda t: t.dense[1:, :4]), "weight", r"\[4, 4\]", r"\[5, 4\]"),
    "conv bias": Case(conv(bias=lambda t: t.x[0]), "bias", r"\[64\]", r"\[5\]"),
    "conv state": Case(
        conv(state=lambda t: t.dense[None, :, :2].to(t.c.dtype)), "state", "2", "at least 3"
    ),
    "conv state dtype": Case(
        conv(state=lambda t: t.dense[None, :, :4].double()), "state", "[dD]ouble", "[fF]loat"
    ),
    "conv activation": Case(conv(activation="gelu"), "activation", "'gelu'", "'silu'"),
    "delta qkv": Case(delta(qkv=lambda t: t.x), "qkv", r"\[3, 64\]", r"\[B, S"),
    "delta qkv dtype": Case(delta(qkv=lambda t: t.x[None].int()), "qkv", "int|Int", "float32"),
    "delta values": Case(delta(qkv=lambda t: t.x[None, :, 1:]), "qkv", "63", "2 heads of v of 16"),
    "delta without keys": Case(
        delta(qkv=lambda t: t.x[None, :, :32]), "qkv", "32", "q and k of 16"
    ),
    "delta state": Case(
        delta(state=lambda t: t.dense[:4].reshape(STATE).half()), "state", "Half|16", "float32"
    ),
    "delta batch": Case(
        delta(state=lambda t: t.dense[:4].view(2, 2, 4, 16)), "state", r"\[2, 2, 4, 16\]", r"\[1, h"
    ),
    "delta dv": Case(
        delta(state=lambda t: t.dense[:3].view(1, 2, 16, 6)), "state", r"6\]", "multiple of 4"
    ),
    "delta dk": Case(
        delta(state=lambda t: t.dense[:1].repeat(33, 1).view(1, 2, 264, 4)), "state", "264", "256"
    ),
    "delta a": Case(delta(a=lambda t: t.c[None]), "a", r"\[1, 3, 5\]", r"\[1, 3, 2\]"),
    "delta b": Case(delta(b=lambda t: t.c[None, 1:, :2]), "b", r"\[1, 2, 2\]", r"\[1, 3, 2\]"),
    "delta a_log": Case(delta(a_log=lambda t: t.bias), "a_log", r"\[5\]", r"\[2\]"),
    "delta dt_bias": Case(delta(dt_bias=lambda t: t.bias[:2].int()), "dt_bias", "int|Int", "float"),
    "delta eps": Case(delta(eps=-1.0), "eps", "-1", "0 or more"),
    "scan xbc": Case(scan(xbc=lambda t: t.x), "xbc", r"\[3, 64\]", r"\[B, S"),
    "scan xbc dtype": Case(scan(xbc=lambda t: t.x[None].int()), "xbc", "int|Int", "float32"),
    "scan values": Case(scan(xbc=lambda t: t.x[None, :, 1:]), "xbc", "63", "2 heads of x of 16"),
    "scan without b": Case(scan(xbc=lambda t: t.x[None, :, :32]), "xbc", "32", "b and c of 16"),
    "scan state": Case(
        scan(state=lambda t: t.dense[:4].reshape(STATE).half()), "state", "Half|16", "float32"
    ),
    "scan batch": Case(
        scan(state=lambda t: t.dense[:4].view(2, 2, 4, 16)), "state", r"\[2, 2, 4, 16\]", r"\[1, h"
    ),
    "scan n": Case(
        scan(state=lambda t: t.dense[:3].view(1, 2, 16, 6)), "state", r"6\]", "multiple of 4"
    ),
    "scan wide n": Case(
        scan(state=lambda t: t.dense[:1].repeat(33, 1).view(1, 2, 4, 264)), "state", "264", "256"
    ),
    "scan dt": Case(scan(dt=lambda t: t.c[None]), "dt", r"\[1, 3, 5\]", r"\[1, 3, 2\]"),
    "scan a_log": Case(scan(a_log=lambda t: t.bias), "a_log", r"\[5\]", r"\[2\]"),
    "scan dt_bias": Case(scan(dt_bias=lambda t: t.bias[:2].int()), "dt_bias", "int|Int", "float"),
    "scan d": Case(scan(d=lambda t: t.x[0]), "d", r"\[64\]", r"\[2\]"),
    "scan gate": Case(scan(gate=lambda t: t.x[None]), "gate", r"\[1, 3, 64\]", r"\[1, 3, 32\]"),
    "scan dt_min": Case(scan(dt_min=-1.0), "dt_min", "-1", "0 or more"),
    "scan dt_max": Case(scan(dt_min=0.5, dt_max=0.25), "dt_max", "0.25", "dt_min or more"),
    "scan dt_max f32": Case(scan(dt_max=1e39), "dt_max", r"1e\+39", "f32|finite"),
    "norm weight": Case(
        norm(norm_weight=lambda t: t.x[0, 1:]), "norm_weight", r"\[63\]", r"\[64\]"
    ),
    "norm weight dtype": Case(
        norm(norm_weight=lambda t: t.x[0].int()), "norm_weight", "int|Int", "float32"
    ),
    "factors": Case(norm(factors=lambda t: t.bias[1:]), "factors", r"\[4\]", r"\[5\]"),
    "factors and bias": Case(
        norm(factors=lambda t: t.bias, bias=lambda t: t.bias), "factors", "bias", "one of both"
    ),
    "eps": Case(norm(eps=-1e-5), "eps", "-1e-05", "0 or more"),
    "eps NaN": Case(norm(eps=float("nan")), "eps", "nan", "finite"),
    "eps beyond f32": Case(norm(eps=1e300), "eps", "1e\\+300", "finite as f32"),
    "offset": Case(norm(offset=float("inf")), "offset", "inf", "finite"),
    "offset beyond f32": Case(norm(offset=1e300), "offset", "1e\\+300", "finite"),
    "offset of no weight": Case(
        norm(norm_weight=None, offset=1.0), "norm_weight", "missing", "offset = 1"
    ),
    "residual": Case(norm(residual=lambda t: t.c[:, 1:]), "residual", r"\[3, 4\]", r"\[3, 5\]"),
    "residual of linear": Case(linear(residual=lambda t: t.bias), "residual", r"\[5\]", r"\[3, 5"),
    "residual dtype": Case(norm(residual=lambda t: t.c.long()), "residual", "Long|64", "float32"),
    "norm format": Case(norm(format="q9"), "format", "'q9'", "q4_0"),
    "rms_norm weight": Case(rms_norm(weight=lambda t: t.bias), "weight", "5", r"\[64\]"),
    "rms_norm rows": Case(rms_norm(weight=lambda t: t.x[:2]), "weight", r"\[2, 64\]", r"\[3, 64\]"),
    "rms_norm of one row": Case(
        rms_norm(x=lambda t: t.x[0], weight=lambda t: t.x[:2]), "weight", r"\[2, 64\]", r"\[64\]"
    ),
    "rms_norm residual": Case(
        rms_norm(residual=lambda t: t.x[1:]), "residual", r"\[2, 64\]", "3, 64"
    ),
    "rms_norm gate": Case(rms_norm(gate=lambda t: t.x[0]), "gate", r"\[64\]", "3, 64"),
    "add_rms_norm": Case(
        add_rms_norm(residual=lambda t: t.x[0]), "residual", r"\[64\]", r"\[3, 64\]"
    ),
    "activation": Case(
        swiglu(activation="tanh"), "activation", "'tanh'", "silu, gelu, gelu_tanh, relu2"
    ),
    "activation of down": Case(swiglu_linear(activation=""), "activation", "''", "silu"),
    "gate_scale": Case(swiglu(gate_scale=1e39), "gate_scale", r"1e\+39", "f32|finite"),
    "norm weight without eps": Case(
        swiglu(norm_weight=lambda t: t.x[0]), "eps", "missing", "norm_weight"
    ),
    "qkv dims": Case(rope(qkv=lambda t: t.x), "qkv", r"\[3, 64\]", r"\[B, S"),
    "qkv heads": Case(rope(heads=3), "qkv", "64", "5 heads"),
    "heads": Case(rope(heads=0), "heads", "0", "1"),
    "kv_heads": Case(rope(kv_heads=-1), "kv_heads", "-1", "negative"),
    "cos": Case(rope(cos=lambda t: t.x[:, :8]), "cos", r"\[3, 8\]", r"\[B or 1"),
    "cos positions": Case(rope(cos=lambda t: t.x[None, 1:, :8]), "cos", r"\[1, 2, 8\]", "3, R"),
    "cos odd": Case(rope(cos=lambda t: t.x[None, :, :7]), "cos", "7", "even"),
    "cos wide": Case(rope(cos=lambda t: t.x[None, :, :18]), "cos", "18", "16"),
    "sin": Case(rope(sin=lambda t: t.x[None, :, :6]), "sin", r"\[1, 3, 6\]", r"\[1, 3, 8\]"),
    "q_norm": Case(rope(q_norm=lambda t: t.bias), "q_norm", r"\[5\]", r"\[16\]"),
    "k_norm": Case(rope(k_norm=lambda t: t.bias), "k_norm", r"\[5\]", r"\[16\]"),
    "q_norm of a head": Case(
        rope(kv_heads=2, v=lambda t: t.x[None, :, :32], k_norm=lambda t: t.x[0, :32]),
        "q_norm",
        r"\[16\]",
        r"\[32\]",
    ),
    "v of rope": Case(
        rope(v=lambda t: t.x[None], qkv=lambda t: t.x[None, :, :48]), "v", "3, 64", r"\[1, 3, 16\]"
    ),
}

"""Bad calls of the ops between the matrix products, as error_cases.py has them for the others."""

from __future__ import annotations

import torch
from error_cases import Fitting, bad, linear, swiglu, swiglu_linear

ops = torch.ops.metalmm


norm = Fitting(
    ops.norm_linear,
    lambda t: dict(
        x=t.x, norm_weight=t.x[0], eps=1e-5, offset=0.0, weight=t.w, bias=None, format="q4_0",
        residual=t.c,
    ),
)  # fmt: skip
rms_norm = Fitting(ops.rms_norm, lambda t: dict(x=t.x, weight=None, eps=1e-5))
add_rms_norm = Fitting(ops.add_rms_norm, lambda t: dict(x=t.x, residual=t.x, weight=None, eps=1e-5))
# 2 heads of q, one of k and one of v, 16 values each.
rope = Fitting(
    ops.rope,
    lambda t: dict(
        qkv=t.x[None], cos=t.x[None, :, :8], sin=t.x[None, :, 8:16], heads=2, kv_heads=1,
        q_norm=t.x[0, :16], eps=1e-5,
    ),
)  # fmt: skip
# 3 positions of 5 channels, 4 taps.
conv = Fitting(
    ops.causal_conv,
    lambda t: dict(
        x=t.c[None], weight=t.dense[:, :4], bias=None, activation="silu",
        state=t.dense[:, :4].to(t.c.dtype)[None].clone(),
    ),
)  # fmt: skip
# 3 positions, 2 heads of 16 values: a head of q and k, and 2 of v; or 2 heads of x, b and c.
STATE = (1, 2, 8, 16)
delta = Fitting(
    ops.gated_delta,
    lambda t: dict(
        qkv=t.x[None], a=t.c[None, :, :2], b=t.c[None, :, 2:4], a_log=t.bias[:2],
        dt_bias=t.bias[2:4], state=t.dense[:4].reshape(STATE).repeat(1, 1, 2, 1),
    ),
)  # fmt: skip
scan = Fitting(
    ops.ssm_scan,
    lambda t: dict(
        xbc=t.x[None], dt=t.c[None, :, :2], a_log=t.bias[:2], dt_bias=t.bias[2:4], d=t.bias[1:3],
        state=t.dense[:4].reshape(STATE).repeat(1, 1, 2, 1),
    ),
)  # fmt: skip
OF_STATES = (  # delta's and scan's
    bad("state", lambda t: t.dense[:4].reshape(STATE).half(), "Half|16", "float32"),
    bad("state", lambda t: t.dense[:4].view(2, 2, 4, 16), r"\[2, 2, 4, 16\]", r"\[1, h"),
    bad("state", lambda t: t.dense[:3].view(1, 2, 16, 6), r"6\]", "multiple of 4"),
)
tables = Fitting(ops.rope_tables, lambda t: dict(positions=t.ids.view(1, -1), inv_freq=t.dense[0]))
hadamard = Fitting(ops.hadamard, lambda t: dict(x=t.x))
# 3 tokens to 2 of 64 experts in 4 groups.
route = Fitting(ops.route, lambda t: dict(x=t.x, top_k=2, groups=4, kept_groups=2))


LAYER_CASES = {
    **hadamard.refuses(
        bad("x", lambda t: t.x[:, :48], "48 values", "multiple of 32"),
        bad("x", lambda t: t.x.int(), "int|Int", "float32"),
    ),
    **route.refuses(
        bad("x", lambda t: t.x[None], r"\[1, 3, 64\]", r"\[T, E\]"),
        bad("weight", lambda t: t.w, r"\[5, 36\]", "q8_0|68", format="q8_0"),
        bad("bias", lambda t: t.bias, r"\[5\]", r"\[64\]"),
        bad("choice_bias", lambda t: t.bias, r"\[5\]", "64"),
        bad("scoring", "relu", "relu", "softmax, sigmoid"),
        bad("top_k", 33, "33", "1 to 32, of 32 experts"),
        bad("groups", 5, "5", "divide the 64"),
        bad("kept_groups", 5, "5", "1 to the 4"),
        bad("group_best", 3, "3", "1, or 2"),
        bad("shared", lambda t: t.c, r"\[3, 5\]", r"\[3, 1\]"),
        bad("top_k", 32, "32", "1 to 31", shared=lambda t: t.c[:, :1]),
        bad(
            "shared_weight",
            lambda t: t.dense,
            "5",
            "1",
            weight=lambda t: t.dense,
            groups=1,
            kept_groups=1,
        ),
        bad(
            "shared_weight",
            lambda t: t.w,
            r"\[5, 36\]",
            "q8_0|68",
            weight=lambda t: t.dense,
            groups=1,
            kept_groups=1,
            shared_format="q8_0",
        ),
        bad("shared_weight", lambda t: t.dense[:1], "no weight", "logits"),
        bad("scale", 1e39, r"1e\+39", "f32|finite"),
    ),
    **tables.refuses(
        bad("positions", lambda t: t.ids.int()[None], "int|Int", "int64"),
        bad("inv_freq", lambda t: t.dense[:2], r"\[2, 64\]", r"\[F\]"),
        bad("axes", lambda t: t.ids, r"\[2\]", r"\[64\]", positions=lambda t: t.ids.view(1, 1, -1)),
        bad("axes", lambda t: t.ids, r"\[1, 2\]", r"\[A, B, S\]", says="positions"),
        bad("interleaved", True, "True", "twice", twice=False),
    ),
    **conv.refuses(
        bad("x", lambda t: t.c, r"\[3, 5\]", r"\[B, S, C\]"),
        bad("x", lambda t: t.c[None].int(), "int|Int", "float32"),
        bad("weight", lambda t: t.dense[:, :9], r"\[5, 9\]", "1 to 8"),
        bad("weight", lambda t: t.dense[1:, :4], r"\[4, 4\]", r"\[5, 4\]"),
        bad("bias", lambda t: t.x[0], r"\[64\]", r"\[5\]"),
        bad("state", lambda t: t.dense[None, :, :2].to(t.c.dtype), "2", "at least 3"),
        bad("state", lambda t: t.dense[None, :, :4].double(), "[dD]ouble", "[fF]loat"),
        bad("activation", "gelu", "'gelu'", "'silu'"),
    ),
    **delta.refuses(
        bad("qkv", lambda t: t.x, r"\[3, 64\]", r"\[B, S"),
        bad("qkv", lambda t: t.x[None].int(), "int|Int", "float32"),
        bad("qkv", lambda t: t.x[None, :, 1:], "63", "2 heads of v of 16"),
        bad("qkv", lambda t: t.x[None, :, :32], "32", "q and k of 16"),
        *OF_STATES,
        bad("state", lambda t: t.dense[:1].repeat(33, 1).view(1, 2, 264, 4), "264", "256"),
        bad("a", lambda t: t.c[None], r"\[1, 3, 5\]", r"\[1, 3, 2\]"),
        bad("b", lambda t: t.c[None, 1:, :2], r"\[1, 2, 2\]", r"\[1, 3, 2\]"),
        bad("a_log", lambda t: t.bias, r"\[5\]", r"\[2\]"),
        bad("dt_bias", lambda t: t.bias[:2].int(), "int|Int", "float"),
        bad("eps", -1.0, "-1", "0 or more"),
    ),
    **scan.refuses(
        bad("xbc", lambda t: t.x, r"\[3, 64\]", r"\[B, S"),
        bad("xbc", lambda t: t.x[None].int(), "int|Int", "float32"),
        bad("xbc", lambda t: t.x[None, :, 1:], "63", "2 heads of x of 16"),
        bad("xbc", lambda t: t.x[None, :, :32], "32", "b and c of 16"),
        *OF_STATES,
        bad("state", lambda t: t.dense[:1].repeat(33, 1).view(1, 2, 4, 264), "264", "256"),
        bad("dt", lambda t: t.c[None], r"\[1, 3, 5\]", r"\[1, 3, 2\]"),
        bad("a_log", lambda t: t.bias, r"\[5\]", r"\[2\]"),
        bad("dt_bias", lambda t: t.bias[:2].int(), "int|Int", "float"),
        bad("d", lambda t: t.x[0], r"\[64\]", r"\[2\]"),
        bad("gate", lambda t: t.x[None], r"\[1, 3, 64\]", r"\[1, 3, 32\]"),
        bad("dt_min", -1.0, "-1", "0 or more"),
        bad("dt_max", 0.25, "0.25", "dt_min or more", dt_min=0.5),
        bad("dt_max", 1e39, r"1e\+39", "f32|finite"),
    ),
    **norm.refuses(
        bad("norm_weight", lambda t: t.x[0, 1:], r"\[63\]", r"\[64\]"),
        bad("norm_weight", lambda t: t.x[0].int(), "int|Int", "float32"),
        bad("factors", lambda t: t.bias[1:], r"\[4\]", r"\[5\]"),
        bad("factors", lambda t: t.bias, "bias", "one of both", bias=lambda t: t.bias),
        bad("eps", -1e-5, "-1e-05", "0 or more"),
        bad("eps", float("nan"), "nan", "finite"),
        bad("eps", 1e300, "1e\\+300", "finite as f32"),
        bad("offset", float("inf"), "inf", "finite"),
        bad("offset", 1e300, "1e\\+300", "finite"),
        bad("norm_weight", None, "missing", "offset = 1", offset=1.0),
        bad("residual", lambda t: t.c[:, 1:], r"\[3, 4\]", r"\[3, 5\]"),
        bad("residual", lambda t: t.c.long(), "Long|64", "float32"),
        bad("format", "q9", "'q9'", "q4_0"),
    ),
    **linear.refuses(
        bad("residual", lambda t: t.bias, r"\[5\]", r"\[3, 5"),
    ),
    **rms_norm.refuses(
        bad("weight", lambda t: t.bias, "5", r"\[64\]"),
        bad("weight", lambda t: t.x[:2], r"\[2, 64\]", r"\[3, 64\]"),
        bad("weight", lambda t: t.x[:2], r"\[2, 64\]", r"\[64\]", x=lambda t: t.x[0]),
        bad("residual", lambda t: t.x[1:], r"\[2, 64\]", "3, 64"),
        bad("gate", lambda t: t.x[0], r"\[64\]", "3, 64"),
    ),
    **add_rms_norm.refuses(
        bad("residual", lambda t: t.x[0], r"\[64\]", r"\[3, 64\]"),
    ),
    **swiglu.refuses(
        bad("activation", "tanh", "'tanh'", "silu, gelu, gelu_tanh, relu2"),
        bad("gate_scale", 1e39, r"1e\+39", "f32|finite"),
        bad("norm_weight", lambda t: t.x[0], "missing", "norm_weight", says="eps"),
    ),
    **swiglu_linear.refuses(
        bad("activation", "", "''", "silu"),
    ),
    **rope.refuses(
        bad("qkv", lambda t: t.x, r"\[3, 64\]", r"\[B, S"),
        bad("heads", 3, "64", "5 heads", says="qkv"),
        bad("heads", 0, "0", "1"),
        bad("kv_heads", -1, "-1", "negative"),
        bad("cos", lambda t: t.x[:, :8], r"\[3, 8\]", r"\[B or 1"),
        bad("cos", lambda t: t.x[None, 1:, :8], r"\[1, 2, 8\]", "3, R"),
        bad("cos", lambda t: t.x[None, :, :7], "7", "even"),
        bad("cos", lambda t: t.x[None, :, :18], "18", "16"),
        bad("sin", lambda t: t.x[None, :, :6], r"\[1, 3, 6\]", r"\[1, 3, 8\]"),
        bad("q_norm", lambda t: t.bias, r"\[5\]", r"\[16\]"),
        bad("k_norm", lambda t: t.bias, r"\[5\]", r"\[16\]"),
        bad(
            "kv_heads",
            2,
            r"\[16\]",
            r"\[32\]",
            says="q_norm",
            v=lambda t: t.x[None, :, :32],
            k_norm=lambda t: t.x[0, :32],
        ),
        bad("v", lambda t: t.x[None], "3, 64", r"\[1, 3, 16\]", qkv=lambda t: t.x[None, :, :48]),
    ),
}

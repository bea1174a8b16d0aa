"""Good and bad calls of the ops on experts, beside those of op_calls.py and error_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from error_cases import EXPERTS, Fitting, Good, bad, good
from expert_cases import chosen, rows, weights
from inputs import activations

ops = torch.ops.metalmm


def expert_calls(dtype: torch.dtype) -> dict[str, Good]:
    """{label: (op, args, kwargs)}, as op_calls.py has them."""
    w, ids, x = weights("q4_0", EXPERTS), chosen(EXPERTS), rows(EXPERTS, dtype)
    dense = activations(6, 3, 64, seed="dense").transpose(0, 1)
    bias = activations(3, 6, dtype=dtype, seed="bias")
    scores = activations(4, 2, dtype=dtype, seed="scores")
    apart = rows(EXPERTS, dtype, apart=True)
    grad = activations(4, 2, 6, dtype=dtype, seed="grad")
    up = {"up_weight": w.flip(1), "limit": 2.0}
    oai = {"limit": 7.0, "alpha": 1.702}
    return {
        "expert_linear": good(ops.expert_linear, x, w, ids, None, "q4_0"),
        "expert_linear, bias": good(ops.expert_linear, apart, w, ids, bias, "q4_0"),
        "expert_linear, scores": good(ops.expert_linear, apart, w, ids, bias, "q4_0", scores),
        "expert_linear, residual": good(
            ops.expert_linear, x, w, ids, None, "q4_0", scores, residual=bias[[0, 1, 2, 0]]
        ),
        "expert_linear, dense": good(ops.expert_linear, x, dense, ids.int(), None, "f32"),
        "expert_linear, no rows": good(ops.expert_linear, x[:0], w, ids[:0], None, "q4_0"),
        "expert_swiglu": good(ops.expert_swiglu, x, w, ids, None, "q4_0"),
        "expert_swiglu, bias": good(ops.expert_swiglu, apart, w, ids, bias, "q4_0", "gelu"),
        "expert_swiglu, all": good(
            ops.expert_swiglu, x, w, ids, bias, "q4_0", "swiglu_oai", True, **oai
        ),
        "expert_swiglu, up": good(ops.expert_swiglu, x, w, ids, None, "q4_0", "relu2", **up),
        "expert_input_grad": good(ops.expert_input_grad, grad, w, ids, "q4_0", 64),
    }


def fitting(t: Any) -> dict[str, Any]:
    return dict(x=t.tokens, weight=t.experts, ids=t.chosen, bias=t.of_experts, format="q4_0")


linear = Fitting(ops.expert_linear, fitting)
swiglu = Fitting(ops.expert_swiglu, fitting)
input_grad = Fitting(
    ops.expert_input_grad,
    lambda t: dict(grad=t.grad, weight=t.experts, ids=t.chosen, format="q4_0", in_features=64),
)

EXPERT_CASES = {
    **linear.refuses(
        bad("x", lambda t: t.tokens[0], r"\[64\]", r"\[T, K\] or \[T, C"),
        bad("x", lambda t: t.tokens.int(), "int|Int", "float32"),
        bad("x", lambda t: t.tokens[1:], r"\[3, 64\]", r"ids are \[4, 2"),
        bad("x", lambda t: t.tokens[:, None], r"\[4, 1, 64\]", r"ids are \[4, 2"),
        bad("weight", lambda t: t.experts[0], "6, 36", r"\[E, N"),
        bad("weight", lambda t: t.experts[..., 1:], "35", "36"),
        bad("weight", lambda t: t.experts.float(), "loat", "uint8"),
        bad("ids", lambda t: t.chosen[0], r"\[2\]", r"\[T, C\]"),
        bad("ids", lambda t: t.chosen.float(), "loat", "int64"),
        bad("bias", lambda t: t.of_experts[:2], r"\[2, 6\]", r"\[3, 6\]"),
        bad("scores", lambda t: t.of_experts, r"\[3, 6\]", r"\[4, 2\]"),
        bad("format", "q9", "'q9'", "q4_0"),
        bad("strategy", "fast", "'fast'", "gem"),
        bad("activations", "int4", "'int4'", "int8"),
    ),
    **swiglu.refuses(
        bad("activation", "tanh", "'tanh'", "swiglu_oai"),
        bad("alpha", 2.0, "2", "swiglu_oai"),
        bad("alpha", float("nan"), "nan", "finite", activation="swiglu_oai"),
        bad("limit", 0.0, "0", "more than 0"),
        bad("limit", 1e300, "1e\\+300", "finite"),
        bad("weight", lambda t: t.experts[:, :5], "5 rows", "even", bias=None),
        bad("up_weight", lambda t: t.experts, r"\[3, 6\]", r"\[3, 12\]", says="bias"),
        bad("up_weight", lambda t: t.experts[:, 1:], "3, 5", "3, 6", bias=None),
        bad("interleaved", True, "True", "up_weight", up_weight=lambda t: t.experts, bias=None),
    ),
    **input_grad.refuses(
        bad("grad", lambda t: t.grad[:, 0], r"\[4, 6\]", r"\[T, C, N\]"),
        bad("grad", lambda t: t.grad[..., 1:], "5", "6 rows"),
    ),
}

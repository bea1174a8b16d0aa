"""Good and bad calls of the ops on experts, beside those of op_calls.py and error_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from error_cases import EXPERTS, Case, Good, bad, good
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


linear = bad(ops.expert_linear, fitting)
swiglu = bad(ops.expert_swiglu, fitting)
input_grad = bad(
    ops.expert_input_grad,
    lambda t: dict(grad=t.grad, weight=t.experts, ids=t.chosen, format="q4_0", in_features=64),
)

EXPERT_CASES = {
    "experts: x dims": Case(linear(x=lambda t: t.tokens[0]), "x", r"\[64\]", r"\[T, K\] or \[T, C"),
    "experts: x dtype": Case(linear(x=lambda t: t.tokens.int()), "x", "int|Int", "float32"),
    "experts: x tokens": Case(
        linear(x=lambda t: t.tokens[1:]), "x", r"\[3, 64\]", r"ids are \[4, 2"
    ),
    "experts: x choices": Case(
        linear(x=lambda t: t.tokens[:, None]), "x", r"\[4, 1, 64\]", r"ids are \[4, 2"
    ),
    "experts: W dims": Case(linear(weight=lambda t: t.experts[0]), "weight", "6, 36", r"\[E, N"),
    "experts: W row": Case(linear(weight=lambda t: t.experts[..., 1:]), "weight", "35", "36"),
    "experts: W dtype": Case(linear(weight=lambda t: t.experts.float()), "weight", "loat", "uint8"),
    "experts: ids dims": Case(linear(ids=lambda t: t.chosen[0]), "ids", r"\[2\]", r"\[T, C\]"),
    "experts: ids dtype": Case(linear(ids=lambda t: t.chosen.float()), "ids", "loat", "int64"),
    "experts: bias": Case(
        linear(bias=lambda t: t.of_experts[:2]), "bias", r"\[2, 6\]", r"\[3, 6\]"
    ),
    "experts: scores": Case(
        linear(scores=lambda t: t.of_experts), "scores", r"\[3, 6\]", r"\[4, 2\]"
    ),
    "experts: format": Case(linear(format="q9"), "format", "'q9'", "q4_0"),
    "experts: strategy": Case(linear(strategy="fast"), "strategy", "'fast'", "gem"),
    "experts: activations": Case(linear(activations="int4"), "activations", "'int4'", "int8"),
    "experts: activation": Case(swiglu(activation="tanh"), "activation", "'tanh'", "swiglu_oai"),
    "experts: alpha": Case(swiglu(alpha=2.0), "alpha", "2", "swiglu_oai"),
    "experts: alpha NaN": Case(
        swiglu(alpha=float("nan"), activation="swiglu_oai"), "alpha", "nan", "finite"
    ),
    "experts: limit": Case(swiglu(limit=0.0), "limit", "0", "more than 0"),
    "experts: limit beyond f32": Case(swiglu(limit=1e300), "limit", "1e\\+300", "finite"),
    "experts: odd rows": Case(
        swiglu(weight=lambda t: t.experts[:, :5], bias=None), "weight", "5 rows", "even"
    ),
    "experts: bias of gate and up": Case(
        swiglu(up_weight=lambda t: t.experts), "bias", r"\[3, 6\]", r"\[3, 12\]"
    ),
    "experts: up_weight": Case(
        swiglu(up_weight=lambda t: t.experts[:, 1:], bias=None), "up_weight", "3, 5", "3, 6"
    ),
    "experts: interleaved": Case(
        swiglu(up_weight=lambda t: t.experts, interleaved=True, bias=None),
        "interleaved",
        "True",
        "up_weight",
    ),
    "experts: grad dims": Case(
        input_grad(grad=lambda t: t.grad[:, 0]), "grad", r"\[4, 6\]", r"\[T, C, N\]"
    ),
    "experts: grad": Case(input_grad(grad=lambda t: t.grad[..., 1:]), "grad", "5", "6 rows"),
}

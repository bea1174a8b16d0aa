"""A call of every op with and without its optional arguments."""

from __future__ import annotations

from typing import Any

import torch
from cache_calls import cache_calls
from error_cases import Good, good
from expert_calls import expert_calls
from inputs import activations, random_weight

ops = torch.ops.metalmm


def named(call: Good) -> dict[str, Any]:
    """What a call is given, by the names of its op's schema."""
    op, args, kwargs = call
    names = [a.name for a in op.default._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def op_calls(dtype: torch.dtype) -> dict[str, Good]:
    """{label: (op, args, kwargs)}: every op, with and without its optional arguments."""
    k, n = 64, 5
    w = random_weight("q4_0", n, k)
    dense = activations(n, k, seed="dense")
    x, bias = activations(3, k, dtype=dtype), activations(n, dtype=dtype, seed="bias")
    c = activations(3, n, dtype=dtype, seed="c")
    x3 = activations(3, 2, k, dtype=dtype).transpose(0, 1)
    ids = torch.tensor([[4, 0, 2], [1, 1, 3]])
    g = activations(3, n, dtype=dtype, seed="g")
    state = activations(2, 2, 8, 16, seed="state")
    scan_state = activations(2, 2, 16, 8, seed="scan")
    ab, of_heads = (x3[..., :2], x3[..., 2:4]), bias[:4].view(2, 2)
    turned = x3[..., :48], x3[..., :8], x3[..., 8:16]
    conv_state = activations(2, k, 3, dtype=dtype, seed="conv")
    return (
        cache_calls(dtype)
        | expert_calls(dtype)
        | {
            "linear": good(ops.linear, x, w, None, "q4_0"),
            "linear, bias": good(ops.linear, x3, w, bias, "q4_0"),
            "linear, strategy": good(ops.linear, x, w, bias, "q4_0", "gemm"),
            "linear, 1-D": good(ops.linear, x[0], w, None, "q4_0"),
            "linear, no rows": good(ops.linear, x[:0], w, None, "q4_0"),
            "linear, no columns": good(ops.linear, x, w[:0], None, "q4_0"),
            "linear, columns first": good(ops.linear, x.T.contiguous().T, w, None, "q4_0"),
            "linear, dense": good(ops.linear, x, dense, None, "f32"),
            "linear_input_grad": good(ops.linear_input_grad, g, w, "q4_0", k),
            "swiglu": good(ops.swiglu, x3, w, w.flip(0), "q4_0", "q4_0"),
            "swiglu, two formats": good(ops.swiglu, x, w, dense, "q4_0", "f32"),
            "swiglu, gate_scale": good(
                ops.swiglu, x3, w, w.flip(0), "q4_0", "q4_0", gate_scale=0.6
            ),
            "swiglu_linear": good(ops.swiglu_linear, x, x.flip(0), w, None, "q4_0"),
            "swiglu_linear, bias": good(ops.swiglu_linear, x3, x3.flip(0), w, bias, "q4_0"),
            "linear, residual": good(ops.linear, x, w, bias, "q4_0", None, c),
            "norm_linear": good(ops.norm_linear, x, None, 1e-5, 0.0, w, None, "q4_0"),
            "norm_linear, all": good(ops.norm_linear, x, x[0], 1e-5, 1.0, w, bias, "q4_0", c),
            "norm_linear, factors": good(
                ops.norm_linear, x, x[0], 1e-5, 1.0, w, None, "q4_0", c, factors=bias
            ),
            "swiglu, norm": good(ops.swiglu, x, w, w, "q4_0", "q4_0", "gelu", x[0], 1e-5, 1.0),
            "swiglu_linear, all": good(
                ops.swiglu_linear, x, x.flip(0), w, bias, "q4_0", "gelu_tanh", c
            ),
            "rms_norm": good(ops.rms_norm, x3, None, 1e-5),
            "rms_norm, all": good(ops.rms_norm, x, x[0], 1e-5, 1.0, x.flip(0), x.flip(1)),
            "rms_norm, rows": good(ops.rms_norm, x3, x[:3].float(), 1e-5),
            "add_rms_norm": good(ops.add_rms_norm, x, x.flip(0), x[0], 1e-5),
            "rope": good(ops.rope, x3, x3[:1, :, :16], x3[:1, :, 16:32], 2, 1),
            "rope, all": good(
                *(ops.rope, *turned, 2, 1, x3[..., 48:], x[0, :16], x[1, :16]),
                **{"eps": 1e-5, "offset": 1.0, "interleaved": True},
            ),
            "route": good(ops.route, x, 2, renormalise=True, groups=4, kept_groups=2),
            "route, weight": good(
                ops.route, x, 3, w, bias, "q4_0", choice_bias=bias.float(), scoring="sigmoid"
            ),
            "route, shared": good(ops.route, x, 2, shared=c[:, :1]),
            "route, shared row": good(
                *(ops.route, x, 2, w, None, "q4_0"),
                **{"shared_weight": dense[:1], "shared_format": "f32"},
            ),
            "hadamard": good(ops.hadamard, x3),
            "rope_tables": good(ops.rope_tables, ids, dense[0]),
            "rope_tables, all": good(
                *(ops.rope_tables, ids[:, None], dense[0], torch.arange(k) % 2),
                **{"interleaved": True, "scale": 0.5, "dtype": dtype},
            ),
            "causal_conv": good(ops.causal_conv, x3, x[:2].T, None, conv_state),
            "causal_conv, all": good(ops.causal_conv, x3, x.float().T, x[0], conv_state, "silu"),
            "gated_delta": good(ops.gated_delta, x3, *ab, *of_heads, state),
            "gated_delta, eps": good(ops.gated_delta, x3, *ab, *of_heads.float(), state, 1e-3),
            "ssm_scan": good(ops.ssm_scan, x3, ab[0], *of_heads, c[0, :2], scan_state),
            "ssm_scan, all": good(
                *(ops.ssm_scan, x3, ab[0], *of_heads.float(), bias[3:].float(), scan_state),
                **{"gate": x3[..., :32].float(), "dt_min": 0.25, "dt_max": 0.75},
            ),
            "gemv": good(ops.gemv, x[0], w, "q4_0"),
            "gemv, c": good(ops.gemv, x[0], w, "q4_0", c[0], -0.5, 2.0, "gemv"),
            "gemm": good(ops.gemm, x, w, "q4_0"),
            "gemm, c": good(ops.gemm, x, w, "q4_0", c, 3.0, -1.5),
            "gemm, softcap": good(ops.gemm, x, w, "q4_0", c, 3.0, -1.5, softcap=2.5),
            "dequantize": good(ops.dequantize, w, "q4_0"),
            "dequantize, dtype": good(ops.dequantize, w, "q4_0", k, dtype=dtype),
            "dequantize, dense": good(ops.dequantize, dense, "f32", dtype=dtype),
            "dequantize, f32": good(ops.dequantize, dense, "f32"),  # whose bytes are the result's
            "quantize": good(ops.quantize, activations(3, k, dtype=dtype), "q8_0"),
            "quantize, all": good(
                ops.quantize, activations(3, k, dtype=dtype), "q4_0", activations(1, k)[0].abs()
            ),
            "embedding": good(ops.embedding, ids, w, "q4_0"),
            "embedding, int32": good(ops.embedding, ids.int(), w, "q4_0", k, dtype=dtype),
            "embedding, scale": good(ops.embedding, ids, w, "q4_0", dtype=dtype, scale=dense[0, 0]),
            "embedding, scales": good(ops.embedding, ids, w, "q4_0", scale=dense[:, 0]),
            "embedding, scalar": good(ops.embedding, ids[0, 0], w, "q4_0"),
            "probe": good(ops.probe, x3, x3.flip(0), "div"),
            "probe, dot": good(ops.probe, x, x.flip(0), "dot"),
        }
    )

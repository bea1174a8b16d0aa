"""Bad calls of every op, and what the error of each must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from expert_cases import Experts, chosen, rows, weights
from inputs import activations, random_weight
from torch import Tensor

from torch_metalmm import formats

ops = torch.ops.metalmm

N, K = 5, 64
EXPERTS = Experts(experts=3, n=6, k=64, tokens=4, choices=2)
TYPES = ("float32", "float16", "bfloat16")


def arguments() -> dict[str, Tensor]:
    """Good arguments of shapes that fit, in q4_0 unless the name says another format."""
    nan = activations(4, K)
    nan[2, 7] = torch.nan
    inf = activations(4, K)
    inf[1] = -torch.inf
    return {
        "x": activations(3, K),
        "w": random_weight("q4_0", N, K),
        "dense": activations(N, K),
        "wide": random_weight("affine2_g32", N, 128),
        "bias": torch.zeros(N),
        "c": torch.zeros(3, N),
        "ids": torch.tensor([0, 4]),
        "nan": nan,
        "inf": inf,
        "tokens": rows(EXPERTS, torch.float32),
        "experts": weights("q4_0", EXPERTS),
        "chosen": chosen(EXPERTS),
        "of_experts": torch.zeros(3, 6),
        "grad": torch.zeros(4, 2, 6),
    }


Call = Callable[[Any], Any]


@dataclass
class Case:
    """A bad call, and what its error must say: regular expressions, in order."""

    call: Call
    argument: str
    given: str
    allowed: str
    error: type[Exception] = ValueError
    data: bool = False  # the values are at fault, which a fake cannot see


Good = tuple[Any, tuple[Any, ...], dict[str, Any]]


def good(op: Any, *args: Any, **kwargs: Any) -> Good:
    """A call, for op_calls.py."""
    return op, args, kwargs


def bad(op: Any, fitting: Callable[[Any], dict[str, Any]]) -> Callable[..., Call]:
    """A maker of calls: fitting arguments but for changes, which are values or functions of t."""

    def changed(**changes: Any) -> Call:
        def call(t: Any) -> Any:
            return op(**fitting(t) | {k: v(t) if callable(v) else v for k, v in changes.items()})

        return call

    return changed


linear = bad(ops.linear, lambda t: dict(x=t.x, weight=t.w, bias=None, format="q4_0"))
gemm = bad(ops.gemm, lambda t: dict(x=t.x, weight=t.w, format="q4_0"))
gemv = bad(ops.gemv, lambda t: dict(x=t.x[0], weight=t.w, format="q4_0"))
swiglu = bad(
    ops.swiglu,
    lambda t: dict(x=t.x, gate_weight=t.w, up_weight=t.w, format_gate="q4_0", format_up="q4_0"),
)
swiglu_linear = bad(
    ops.swiglu_linear, lambda t: dict(gate=t.x, up=t.x, weight=t.w, bias=None, format="q4_0")
)
input_grad = bad(
    ops.linear_input_grad, lambda t: dict(grad=t.c, weight=t.w, format="q4_0", in_features=K)
)
probe = bad(ops.probe, lambda t: dict(x=t.x, x2=t.x, op="add"))
dequantize = bad(ops.dequantize, lambda t: dict(weight=t.w, format="q4_0"))
embedding = bad(ops.embedding, lambda t: dict(ids=t.ids, weight=t.w, format="q4_0"))
quantize = bad(ops.quantize, lambda t: dict(w=t.x, format="q4_0"))


def rows_of(name: str, bytes_given: int, k: int) -> tuple[str, str]:
    return rf"\[{N}, {bytes_given}\]", str(formats.get(name).row_bytes(k))


CASES = {
    # x
    "x int": Case(linear(x=lambda t: t.x.int()), "x", "int|Int", "float32, float16, bfloat16"),
    "x f64": Case(linear(x=lambda t: t.x.double()), "x", "float64|Double", ", ".join(TYPES)),
    "x 0-dim": Case(linear(x=lambda t: t.x[0, 0]), "x", "dimension", r"\[\.\.\., K\]"),
    "x K": Case(linear(x=lambda t: t.x[:, :32]), "weight", *rows_of("q4_0", 36, 32)),
    "x K block": Case(linear(x=lambda t: t.x[:, :40]), "weight", "K = 40", "32 values"),
    "x K block affine": Case(
        linear(x=lambda t: t.x[:, :32], format="affine4_g64"), "weight", "K = 32", "64 values"
    ),
    # weight
    "weight dtype": Case(linear(weight=lambda t: t.w.char()), "weight", "int8|Char", "uint8"),
    "weight f32 as q4_0": Case(linear(weight=lambda t: t.dense), "weight", "[Ff]loat", "uint8"),
    "weight f32 as f16": Case(
        linear(weight=lambda t: t.dense, format="f16"), "weight", "[Ff]loat", "uint8"
    ),
    "weight row": Case(linear(weight=lambda t: t.w[:, :-1]), "weight", *rows_of("q4_0", 35, K)),
    "weight of another format": Case(linear(format="q8_0"), "weight", *rows_of("q8_0", 36, K)),
    "weight dense K": Case(
        linear(weight=lambda t: t.dense[:, 1:], format="f32"), "weight", rf"\[{N}, 63\]", "64"
    ),
    "weight 1-D": Case(linear(weight=lambda t: t.w[0]), "weight", r"\[36\]", r"\[N, row_bytes\]"),
    "weight 3-D": Case(linear(weight=lambda t: t.w[None]), "weight", r"\[1, 5, 36\]", "N, row_b"),
    # format, strategy
    "format": Case(linear(format="q9_0"), "format", "'q9_0'", "q4_0.*affine8_g128_f32"),
    "format empty": Case(linear(format=""), "format", "''", "f32, f16"),
    "strategy": Case(linear(strategy="fast"), "strategy", "'fast'", "gemv"),
    # bias
    "bias shape": Case(linear(bias=lambda t: t.bias[1:]), "bias", r"\[4\]", rf"\[{N}\]"),
    "bias 2-D": Case(linear(bias=lambda t: t.bias[None]), "bias", r"\[1, 5\]", rf"\[{N}\]"),
    "bias int": Case(linear(bias=lambda t: t.bias.int()), "bias", "int32|Int", ", ".join(TYPES)),
    "bias f64": Case(linear(bias=lambda t: t.bias.double()), "bias", "float64|Double", "float32"),
    # gemm, gemv
    "c shape": Case(gemm(c=lambda t: t.c[1:], beta=1.0), "c", r"\[2, 5\]", r"\[3, 5\]"),
    "c not broadcast": Case(gemm(c=lambda t: t.bias, beta=1.0), "c", r"\[5\]", r"\[3, 5\]"),
    "c shape of gemv": Case(gemv(c=lambda t: t.c, beta=1.0), "c", r"\[3, 5\]", r"\[5\]"),
    "c dtype": Case(gemm(c=lambda t: t.c.long(), beta=1.0), "c", "int64|Long", "float32"),
    "beta without c": Case(gemm(beta=0.5), "c", "miss", "0.5"),
    "alpha beyond f32": Case(gemm(alpha=1e300), "alpha", r"1e\+300", "finite as f32"),
    "beta beyond f32": Case(gemv(c=lambda t: t.bias, beta=-1e39), "beta", r"-1e\+39", "finite as"),
    "gemv of a matrix": Case(gemv(x=lambda t: t.x), "x", r"\[3, 64\]", "1 dim"),
    "gemm of a vector": Case(gemm(x=lambda t: t.x[0]), "x", r"\[64\]", "2 dim"),
    "gemm of 3-D": Case(gemm(x=lambda t: t.x[None]), "x", r"\[1, 3, 64\]", "2 dim"),
    "gemm softcap": Case(gemm(softcap=-2.0), "softcap", "-2", "above 0"),
    "gemm strategy": Case(gemm(strategy="x"), "strategy", "'x'", "gemv"),
    # swiglu, swiglu_linear
    "gate_weight": Case(swiglu(gate_weight=lambda t: t.w[:, 1:]), "gate_weight", "35", "36"),
    "up_weight": Case(swiglu(up_weight=lambda t: t.w[:, 1:]), "up_weight", "35", "36"),
    "up_weight rows": Case(swiglu(up_weight=lambda t: t.w[1:]), "up_weight", "4 rows", "5"),
    "format_up": Case(swiglu(format_up="no"), "format", "'no'", "q4_0"),
    "gate dtype": Case(swiglu_linear(gate=lambda t: t.x.int()), "gate", "int|Int", "float32"),
    "up shape": Case(swiglu_linear(up=lambda t: t.x[1:]), "up", r"\[2, 64\]", r"\[3, 64\]"),
    "up dtype": Case(swiglu_linear(up=lambda t: t.x.int()), "up", "int|Int", "float32"),
    "swiglu_linear bias": Case(swiglu_linear(bias=lambda t: t.c), "bias", r"\[3, 5\]", r"\[5\]"),
    # linear_input_grad
    "grad": Case(input_grad(grad=lambda t: t.c[:, 1:]), "grad", "size 4", "5 rows"),
    "grad in_features": Case(input_grad(in_features=32), "weight", *rows_of("q4_0", 36, 32)),
    # probe
    "probe dtype": Case(
        probe(x=lambda t: t.x.int(), x2=lambda t: t.x.int()), "x", "int|Int", "float32"
    ),
    "probe shape": Case(probe(x2=lambda t: t.x[1:]), "x2", r"\[2, 64\]", r"\[3, 64\]"),
    "probe x2 dtype": Case(probe(x2=lambda t: t.x.half(), op="mul"), "x2", "Half|16", "Float|32"),
    "probe op": Case(probe(op="pow"), "op", "'pow'", "add, sub, mul, div, dot"),
    # dequantize, embedding
    "dequantize in_features": Case(dequantize(in_features=96), "weight", *rows_of("q4_0", 36, 96)),
    "dequantize negative": Case(dequantize(in_features=-32), "weight", "-32", "32"),
    "dequantize row": Case(dequantize(weight=lambda t: t.w[:, 1:]), "weight", "35", "q4_0"),
    "dequantize 1-D": Case(dequantize(weight=lambda t: t.w[0]), "weight", r"\[36\]", "N, row"),
    "dequantize dtype": Case(dequantize(dtype=torch.int8), "dtype", "int8|Char", "float32"),
    "dequantize ambiguous": Case(
        dequantize(weight=lambda t: t.wide, format="affine2_g32"),
        "in_features",
        "96 or 128",
        "which",
    ),
    "embedding ambiguous": Case(
        embedding(weight=lambda t: t.wide, format="affine2_g32"),
        "in_features",
        "96 or 128",
        "which",
    ),
    "embedding row": Case(embedding(in_features=32), "weight", *rows_of("q4_0", 36, 32)),
    "embedding dtype": Case(embedding(dtype=torch.float64), "dtype", "float64|Double", "float32"),
    "ids dtype": Case(embedding(ids=lambda t: t.ids.float()), "ids", "float|Float", "int64, int32"),
    "ids bool": Case(embedding(ids=lambda t: t.ids.bool()), "ids", "bool|Bool", "int64, int32"),
    "embedding scale": Case(
        embedding(scale=lambda t: t.bias[1:]), "scale", r"\[4\]", "one value or 5, one for each row"
    ),
    "ids too large": Case(
        embedding(ids=lambda t: t.ids + 1), "ids", "5", "5 rows", IndexError, True
    ),
    "ids negative": Case(
        embedding(ids=lambda t: t.ids.int() - 1), "ids", "-1", "5 rows", IndexError, True
    ),
    "ids of an empty table": Case(
        embedding(weight=lambda t: t.w[:0]), "ids", "2 of", "0 rows", IndexError
    ),
    "ids beyond int32": Case(
        embedding(ids=lambda t: t.ids + 2**32), "ids", "4294967296", "5 rows", IndexError, True
    ),
    # quantize
    "quantize NaN": Case(quantize(w=lambda t: t.nan), "w", "row 2", "NaN", data=True),
    "quantize Inf": Case(
        quantize(w=lambda t: t.inf, format="affine4_g32"), "w", "row 1", "Inf", data=True
    ),
    "quantize Inf f16": Case(
        quantize(w=lambda t: t.inf.half(), format="q8_0"), "w", "row 1", "", data=True
    ),
    "quantize dtype": Case(quantize(w=lambda t: t.w), "w", "uint8|Byte", "float32"),
    "quantize f64": Case(
        quantize(w=lambda t: t.x.double()), "w", "float64|Double", ", ".join(TYPES)
    ),
    "quantize 1-D": Case(quantize(w=lambda t: t.x[0]), "w", r"\[64\]", r"\[N, K\]"),
    "quantize 3-D": Case(quantize(w=lambda t: t.x[None]), "w", r"\[1, 3, 64\]", "N, K"),
    "quantize 0-dim": Case(quantize(w=lambda t: t.x[0, 0]), "w", "dimension|shape", "K"),
    "quantize K": Case(quantize(w=lambda t: t.x[:, :40]), "w", "K = 40", "32 values"),
    "quantize format": Case(quantize(format="int4"), "format", "'int4'", "q4_0, q4_1"),
}

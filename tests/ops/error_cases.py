"""Bad calls of every op, and what the error of each must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from inputs import activations, random_weight
from torch import Tensor

from torch_metalmm import formats

ops = torch.ops.metalmm

N, K = 5, 64
TYPES = ("float32", "float16", "bfloat16")


def arguments() -> dict[str, Tensor]:
    """Good arguments of shapes that fit, in q4_0 unless the name says another format."""
    bad = activations(4, K)
    bad[2, 7] = torch.nan
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
        "nan": bad,
        "inf": inf,
    }


@dataclass
class Case:
    """A bad call, and what its error must say: regular expressions, in order."""

    call: Callable[[Any], Any]
    argument: str
    given: str
    allowed: str
    error: type[Exception] = ValueError
    data: bool = False  # the values are at fault, which a fake cannot see


def linear(**changes: Any) -> Callable[[Any], Any]:
    def call(t: Any) -> Any:
        good = {"x": t.x, "weight": t.w, "bias": None, "format": "q4_0", "strategy": None}
        changed = {k: v(t) if callable(v) else v for k, v in changes.items()}
        return ops.linear(*(good | changed).values())

    return call


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
    "c shape": Case(
        lambda t: ops.gemm(t.x, t.w, "q4_0", t.c[1:], 1.0, 1.0), "c", r"\[2, 5\]", r"\[3, 5\]"
    ),
    "c not broadcast": Case(
        lambda t: ops.gemm(t.x, t.w, "q4_0", t.bias, 1.0, 1.0), "c", r"\[5\]", r"\[3, 5\]"
    ),
    "c shape of gemv": Case(
        lambda t: ops.gemv(t.x[0], t.w, "q4_0", t.c, 1.0, 1.0), "c", r"\[3, 5\]", r"\[5\]"
    ),
    "c dtype": Case(
        lambda t: ops.gemm(t.x, t.w, "q4_0", t.c.long(), 1.0, 1.0), "c", "int64|Long", "float32"
    ),
    "beta without c": Case(
        lambda t: ops.gemm(t.x, t.w, "q4_0", None, 1.0, 0.5), "c", "miss", "0.5"
    ),
    "alpha beyond f32": Case(
        lambda t: ops.gemm(t.x, t.w, "q4_0", None, 1e300), "alpha", r"1e\+300", "finite as f32"
    ),
    "beta beyond f32": Case(
        lambda t: ops.gemv(t.x[0], t.w, "q4_0", t.bias, 1.0, -1e39), "beta", r"-1e\+39", "finite as"
    ),
    "gemv of a matrix": Case(lambda t: ops.gemv(t.x, t.w, "q4_0"), "x", r"\[3, 64\]", "1 dim"),
    "gemm of a vector": Case(lambda t: ops.gemm(t.x[0], t.w, "q4_0"), "x", r"\[64\]", "2 dim"),
    "gemm of 3-D": Case(lambda t: ops.gemm(t.x[None], t.w, "q4_0"), "x", r"\[1, 3, 64\]", "2 dim"),
    "gemm strategy": Case(
        lambda t: ops.gemm(t.x, t.w, "q4_0", None, 1.0, 0.0, "x"), "strategy", "'x'", "gemv"
    ),
    # swiglu, swiglu_linear
    "gate_weight": Case(
        lambda t: ops.swiglu(t.x, t.w[:, 1:], t.w, "q4_0", "q4_0"), "gate_weight", "35", "36"
    ),
    "up_weight": Case(
        lambda t: ops.swiglu(t.x, t.w, t.w[:, 1:], "q4_0", "q4_0"), "up_weight", "35", "36"
    ),
    "up_weight rows": Case(
        lambda t: ops.swiglu(t.x, t.w, t.w[1:], "q4_0", "q4_0"), "up_weight", "4 rows", "5"
    ),
    "format_up": Case(lambda t: ops.swiglu(t.x, t.w, t.w, "q4_0", "no"), "format", "'no'", "q4_0"),
    "gate dtype": Case(
        lambda t: ops.swiglu_linear(t.x.int(), t.x, t.w, None, "q4_0"), "gate", "int|Int", "float32"
    ),
    "up shape": Case(
        lambda t: ops.swiglu_linear(t.x, t.x[1:], t.w, None, "q4_0"),
        "up",
        r"\[2, 64\]",
        r"\[3, 64\]",
    ),
    "up dtype": Case(
        lambda t: ops.swiglu_linear(t.x, t.x.int(), t.w, None, "q4_0"), "up", "int|Int", "float32"
    ),
    "swiglu_linear bias": Case(
        lambda t: ops.swiglu_linear(t.x, t.x, t.w, t.c, "q4_0"), "bias", r"\[3, 5\]", r"\[5\]"
    ),
    # linear_input_grad
    "grad": Case(
        lambda t: ops.linear_input_grad(t.c[:, 1:], t.w, "q4_0", K), "grad", "size 4", "5 rows"
    ),
    "grad in_features": Case(
        lambda t: ops.linear_input_grad(t.c, t.w, "q4_0", 32), "weight", *rows_of("q4_0", 36, 32)
    ),
    # probe
    "probe dtype": Case(
        lambda t: ops.probe(t.x.int(), t.x.int(), "add"), "x", "int|Int", "float32"
    ),
    "probe shape": Case(lambda t: ops.probe(t.x, t.x[1:], "add"), "x2", r"\[2, 64\]", r"\[3, 64\]"),
    "probe x2 dtype": Case(
        lambda t: ops.probe(t.x, t.x.half(), "mul"), "x2", "Half|16", "Float|32"
    ),
    "probe op": Case(
        lambda t: ops.probe(t.x, t.x, "pow"), "op", "'pow'", "add, sub, mul, div, dot"
    ),
    # dequantize, embedding
    "dequantize in_features": Case(
        lambda t: ops.dequantize(t.w, "q4_0", 96), "weight", *rows_of("q4_0", 36, 96)
    ),
    "dequantize negative": Case(lambda t: ops.dequantize(t.w, "q4_0", -32), "weight", "-32", "32"),
    "dequantize row": Case(lambda t: ops.dequantize(t.w[:, 1:], "q4_0"), "weight", "35", "q4_0"),
    "dequantize 1-D": Case(lambda t: ops.dequantize(t.w[0], "q4_0"), "weight", r"\[36\]", "N, row"),
    "dequantize dtype": Case(
        lambda t: ops.dequantize(t.w, "q4_0", dtype=torch.int8), "dtype", "int8|Char", "float32"
    ),
    "dequantize ambiguous": Case(
        lambda t: ops.dequantize(t.wide, "affine2_g32"), "in_features", "96 or 128", "which"
    ),
    "embedding ambiguous": Case(
        lambda t: ops.embedding(t.ids, t.wide, "affine2_g32"), "in_features", "96 or 128", "which"
    ),
    "embedding row": Case(
        lambda t: ops.embedding(t.ids, t.w, "q4_0", 32), "weight", *rows_of("q4_0", 36, 32)
    ),
    "embedding dtype": Case(
        lambda t: ops.embedding(t.ids, t.w, "q4_0", dtype=torch.float64),
        "dtype",
        "float64|Double",
        "float32",
    ),
    "ids dtype": Case(
        lambda t: ops.embedding(t.ids.float(), t.w, "q4_0"), "ids", "float|Float", "int64, int32"
    ),
    "ids bool": Case(
        lambda t: ops.embedding(t.ids.bool(), t.w, "q4_0"), "ids", "bool|Bool", "int64, int32"
    ),
    "embedding scale": Case(
        lambda t: ops.embedding(t.ids, t.w, "q4_0", scale=t.bias), "scale", r"\[5\]", "one value"
    ),
    "ids too large": Case(
        lambda t: ops.embedding(t.ids + 1, t.w, "q4_0"), "ids", "5", "5 rows", IndexError, True
    ),
    "ids negative": Case(
        lambda t: ops.embedding(t.ids.int() - 1, t.w, "q4_0"),
        "ids",
        "-1",
        "5 rows",
        IndexError,
        True,
    ),
    "ids of an empty table": Case(
        lambda t: ops.embedding(t.ids, t.w[:0], "q4_0"), "ids", "2 of", "0 rows", IndexError
    ),
    "ids beyond int32": Case(
        lambda t: ops.embedding(t.ids + 2**32, t.w, "q4_0"),
        "ids",
        "4294967296",
        "5 rows",
        IndexError,
        True,
    ),
    # quantize
    "quantize NaN": Case(lambda t: ops.quantize(t.nan, "q4_0"), "w", "row 2", "NaN", data=True),
    "quantize Inf": Case(
        lambda t: ops.quantize(t.inf, "affine4_g32"), "w", "row 1", "Inf", data=True
    ),
    "quantize Inf f16": Case(
        lambda t: ops.quantize(t.inf.half(), "q8_0"), "w", "row 1", "", data=True
    ),
    "quantize dtype": Case(lambda t: ops.quantize(t.w, "q4_0"), "w", "uint8|Byte", "float32"),
    "quantize f64": Case(
        lambda t: ops.quantize(t.x.double(), "q4_0"), "w", "float64|Double", ", ".join(TYPES)
    ),
    "quantize 1-D": Case(lambda t: ops.quantize(t.x[0], "q4_0"), "w", r"\[64\]", r"\[N, K\]"),
    "quantize 3-D": Case(lambda t: ops.quantize(t.x[None], "q4_0"), "w", r"\[1, 3, 64\]", "N, K"),
    "quantize 0-dim": Case(lambda t: ops.quantize(t.x[0, 0], "q4_0"), "w", "dimension|shape", "K"),
    "quantize K": Case(lambda t: ops.quantize(t.x[:, :40], "q4_0"), "w", "K = 40", "32 values"),
    "quantize format": Case(lambda t: ops.quantize(t.x, "int4"), "format", "'int4'", "q4_0, q4_1"),
}

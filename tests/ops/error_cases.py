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


Good = tuple[Any, tuple[Any, ...], dict[str, Any]]


def good(op: Any, *args: Any, **kwargs: Any) -> Good:
    """A call, for op_calls.py."""
    return op, args, kwargs


@dataclass(frozen=True)
class Case:
    """A bad call of an op, and what its error must say: regular expressions, in order."""

    of: Fitting
    changes: dict[str, Any]  # of fitting arguments: values, or functions of arguments()
    argument: str
    given: str
    allowed: str
    error: type[Exception]
    data: bool  # the values are at fault, which a fake cannot see
    nearest: tuple[int, ...]  # ids that a device takes, which is not waited for to see others

    def call(self, t: Any) -> Any:
        made = {k: v(t) if callable(v) else v for k, v in self.changes.items()}
        return self.of.op(**self.of.given(t) | made)


def bad(
    argument: str, value: Any, given: str, allowed: str, *, says: str = "",
    error: type[Exception] = ValueError, data: bool = False, nearest: tuple[int, ...] = (),
    **others: Any,
) -> Callable[[Fitting], Case]:  # fmt: skip
    """A case of a bad argument, and of others that change with it. says: the one that the error
    names, where that is another."""
    rest = (says or argument, given, allowed, error, data or bool(nearest), nearest)
    return lambda of: Case(of, {argument: value} | others, *rest)


@dataclass(frozen=True)
class Fitting:
    """An op, and a function of arguments() that gives it good ones."""

    op: Any
    given: Callable[[Any], dict[str, Any]]

    def refuses(self, *cases: Callable[[Fitting], Case]) -> dict[str, Case]:
        """{label: case}"""
        name = self.op._qualified_op_name.removeprefix("metalmm::")
        made = [case(self) for case in cases]
        return {f"{name}, {', '.join(one.changes)}, {i}": one for i, one in enumerate(made)}


linear = Fitting(ops.linear, lambda t: dict(x=t.x, weight=t.w, bias=None, format="q4_0"))
gemm = Fitting(ops.gemm, lambda t: dict(x=t.x, weight=t.w, format="q4_0"))
gemv = Fitting(ops.gemv, lambda t: dict(x=t.x[0], weight=t.w, format="q4_0"))
swiglu = Fitting(
    ops.swiglu,
    lambda t: dict(x=t.x, gate_weight=t.w, up_weight=t.w, format_gate="q4_0", format_up="q4_0"),
)
swiglu_linear = Fitting(
    ops.swiglu_linear, lambda t: dict(gate=t.x, up=t.x, weight=t.w, bias=None, format="q4_0")
)
input_grad = Fitting(
    ops.linear_input_grad, lambda t: dict(grad=t.c, weight=t.w, format="q4_0", in_features=K)
)
probe = Fitting(ops.probe, lambda t: dict(x=t.x, x2=t.x, op="add"))
dequantize = Fitting(ops.dequantize, lambda t: dict(weight=t.w, format="q4_0"))
embedding = Fitting(ops.embedding, lambda t: dict(ids=t.ids, weight=t.w, format="q4_0"))
quantize = Fitting(ops.quantize, lambda t: dict(w=t.x, format="q4_0"))

# A row of so many bytes may have two numbers of values.
SEVERAL_WIDTHS = bad(
    "weight", lambda t: t.wide, "96 or 128", "which", says="in_features", format="affine2_g32"
)


def rows_of(name: str, bytes_given: int, k: int) -> tuple[str, str]:
    return rf"\[{N}, {bytes_given}\]", str(formats.get(name).row_bytes(k))


CASES = {
    **linear.refuses(
        bad("x", lambda t: t.x.int(), "int|Int", "float32, float16, bfloat16"),
        bad("x", lambda t: t.x.double(), "float64|Double", ", ".join(TYPES)),
        bad("x", lambda t: t.x[0, 0], "dimension", r"\[\.\.\., K\]"),
        bad("x", lambda t: t.x[:, :32], *rows_of("q4_0", 36, 32), says="weight"),
        bad("x", lambda t: t.x[:, :40], "K = 40", "32 values", says="weight"),
        bad("x", lambda t: t.x[:, :32], "K = 32", "64 values", says="weight", format="affine4_g64"),
        bad("weight", lambda t: t.w.char(), "int8|Char", "uint8"),
        bad("weight", lambda t: t.dense, "[Ff]loat", "uint8"),
        bad("weight", lambda t: t.dense, "[Ff]loat", "uint8", format="f16"),
        bad("weight", lambda t: t.w[:, :-1], *rows_of("q4_0", 35, K)),
        bad("format", "q8_0", *rows_of("q8_0", 36, K), says="weight"),
        bad("weight", lambda t: t.dense[:, 1:], rf"\[{N}, 63\]", "64", format="f32"),
        bad("weight", lambda t: t.w[0], r"\[36\]", r"\[N, row_bytes\]"),
        bad("weight", lambda t: t.w[None], r"\[1, 5, 36\]", "N, row_b"),
        bad("format", "q9_0", "'q9_0'", "q4_0.*affine8_g128_f32"),
        bad("format", "", "''", "f32, f16"),
        bad("strategy", "fast", "'fast'", "gemv"),
        bad("bias", lambda t: t.bias[1:], r"\[4\]", rf"\[{N}\]"),
        bad("bias", lambda t: t.bias[None], r"\[1, 5\]", rf"\[{N}\]"),
        bad("bias", lambda t: t.bias.int(), "int32|Int", ", ".join(TYPES)),
        bad("bias", lambda t: t.bias.double(), "float64|Double", "float32"),
    ),
    **gemm.refuses(
        bad("c", lambda t: t.c[1:], r"\[2, 5\]", r"\[3, 5\]", beta=1.0),
        bad("c", lambda t: t.bias, r"\[5\]", r"\[3, 5\]", beta=1.0),
        bad("c", lambda t: t.c.long(), "int64|Long", "float32", beta=1.0),
        bad("beta", 0.5, "miss", "0.5", says="c"),
        bad("alpha", 1e300, r"1e\+300", "finite as f32"),
        bad("x", lambda t: t.x[0], r"\[64\]", "2 dim"),
        bad("x", lambda t: t.x[None], r"\[1, 3, 64\]", "2 dim"),
        bad("softcap", -2.0, "-2", "above 0"),
        bad("strategy", "x", "'x'", "gemv"),
    ),
    **gemv.refuses(
        bad("c", lambda t: t.c, r"\[3, 5\]", r"\[5\]", beta=1.0),
        bad("beta", -1e39, r"-1e\+39", "finite as", c=lambda t: t.bias),
        bad("x", lambda t: t.x, r"\[3, 64\]", "1 dim"),
    ),
    **swiglu.refuses(
        bad("gate_weight", lambda t: t.w[:, 1:], "35", "36"),
        bad("up_weight", lambda t: t.w[:, 1:], "35", "36"),
        bad("up_weight", lambda t: t.w[1:], "4 rows", "5"),
        bad("format_up", "no", "'no'", "q4_0", says="format"),
    ),
    **swiglu_linear.refuses(
        bad("gate", lambda t: t.x.int(), "int|Int", "float32"),
        bad("up", lambda t: t.x[1:], r"\[2, 64\]", r"\[3, 64\]"),
        bad("up", lambda t: t.x.int(), "int|Int", "float32"),
        bad("bias", lambda t: t.c, r"\[3, 5\]", r"\[5\]"),
    ),
    **input_grad.refuses(
        bad("grad", lambda t: t.c[:, 1:], "size 4", "5 rows"),
        bad("in_features", 32, *rows_of("q4_0", 36, 32), says="weight"),
    ),
    **probe.refuses(
        bad("x", lambda t: t.x.int(), "int|Int", "float32", x2=lambda t: t.x.int()),
        bad("x2", lambda t: t.x[1:], r"\[2, 64\]", r"\[3, 64\]"),
        bad("x2", lambda t: t.x.half(), "Half|16", "Float|32", op="mul"),
        bad("op", "pow", "'pow'", "add, sub, mul, div, dot"),
    ),
    **dequantize.refuses(
        bad("in_features", 96, *rows_of("q4_0", 36, 96), says="weight"),
        bad("in_features", -32, "-32", "32", says="weight"),
        bad("weight", lambda t: t.w[:, 1:], "35", "q4_0"),
        bad("weight", lambda t: t.w[0], r"\[36\]", "N, row"),
        bad("dtype", torch.int8, "int8|Char", "float32"),
        SEVERAL_WIDTHS,
    ),
    **embedding.refuses(
        SEVERAL_WIDTHS,
        bad("in_features", 32, *rows_of("q4_0", 36, 32), says="weight"),
        bad("dtype", torch.float64, "float64|Double", "float32"),
        bad("ids", lambda t: t.ids.float(), "float|Float", "int64, int32"),
        bad("ids", lambda t: t.ids.bool(), "bool|Bool", "int64, int32"),
        bad("scale", lambda t: t.bias[1:], r"\[4\]", "one value or 5, one for each row"),
        bad("ids", lambda t: t.ids + 1, "5", "5 rows", error=IndexError, nearest=(1, 4)),
        bad("ids", lambda t: t.ids.int() - 1, "-1", "5 rows", error=IndexError, nearest=(0, 3)),
        bad("weight", lambda t: t.w[:0], "2 of", "0 rows", says="ids", error=IndexError),
        bad(
            "ids", lambda t: t.ids + 2**32, "4294967296", "5 rows", error=IndexError, nearest=(4, 4)
        ),
    ),
    **quantize.refuses(
        bad("w", lambda t: t.nan, "row 2", "NaN", data=True),
        bad("w", lambda t: t.inf, "row 1", "Inf", data=True, format="affine4_g32"),
        bad("w", lambda t: t.inf.half(), "row 1", "", data=True, format="q8_0"),
        bad("w", lambda t: t.w, "uint8|Byte", "float32"),
        bad("w", lambda t: t.x.double(), "float64|Double", ", ".join(TYPES)),
        bad("w", lambda t: t.x[0], r"\[64\]", r"\[N, K\]"),
        bad("w", lambda t: t.x[None], r"\[1, 3, 64\]", "N, K"),
        bad("w", lambda t: t.x[0, 0], "dimension|shape", "K"),
        bad("w", lambda t: t.x[:, :40], "K = 40", "32 values"),
        bad("format", "int4", "'int4'", "q4_0, q4_1"),
    ),
}

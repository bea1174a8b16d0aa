"""The time of a call by itself: a product too small to matter, through several layers of software.

The last two rows are the same op registered from Python, its autograd formula by
torch.library.register_autograd: the price that keeps torch_metalmm's autograd in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torch_metalmm import QuantLinear

from ..runner import Cell, Record, Run, Way, run_cell

SIZE, FORMAT, LOOP = 32, "q4_0", 200
Call = Callable[[Tensor], Tensor]


def _python_ops() -> tuple[torch.library.Library, Call, Call]:
    """linear as Python ops without and with an autograd formula; keep the library alive."""
    library = torch.library.Library("metalmm_bench", "FRAGMENT")
    native = torch.ops.metalmm.linear.default
    input_grad = torch.ops.metalmm.linear_input_grad.default

    def linear(x: Tensor, weight: Tensor, format: str) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return native(x, weight, None, format)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.weight, ctx.format = inputs
        ctx.in_features = x.shape[-1]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return input_grad(grad, ctx.weight, ctx.format, ctx.in_features), None, None

    for name in ("plain", "differentiable"):
        library.define(f"{name}(Tensor x, Tensor weight, str format) -> Tensor")
        library.impl(name, linear, "CPU")
    torch.library.register_autograd(
        "metalmm_bench::differentiable", backward, setup_context=setup_context, lib=library
    )
    ops = torch.ops.metalmm_bench
    return library, ops.plain.default, ops.differentiable.default


def _calls() -> tuple[dict[str, Call], Any]:
    """Every way to call linear, by name, and what must stay alive meanwhile."""
    dense = nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
    packed = QuantLinear.from_linear(dense, FORMAT)
    w, op = packed.weight, torch.ops.metalmm.linear
    library, plain, differentiable = _python_ops()
    return {
        "F.linear f32": lambda x: nn.functional.linear(x, dense.weight),
        "nn.Linear f32": dense,
        "torch.ops.metalmm.linear": lambda x: op(x, w, None, FORMAT),
        "torch.ops.metalmm.linear.default": lambda x: op.default(x, w, None, FORMAT),
        "QuantLinear": packed,
        "a Python op": lambda x: plain(x, w, FORMAT),
        "a Python op with register_autograd": lambda x: differentiable(x, w, FORMAT),
    }, library


def _loop(call: Call, x: Tensor, backward: bool) -> Callable[[int], None]:
    ones = torch.ones(1, SIZE)

    def run(_: int) -> None:
        for _ in range(LOOP):
            y = call(x)
            if backward:
                torch.autograd.grad(y, x, ones)

    return run


MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool, bool]] = {
    "inference_mode": (torch.inference_mode, False, False),
    "no_grad": (torch.no_grad, False, False),
    "grad on, x without": (nullcontext, False, False),
    "x requires grad": (nullcontext, True, False),
    "and backward": (nullcontext, True, True),
}


def run(run: Run) -> Iterator[Record]:
    """Microseconds per call, each mode's calls in turns."""
    calls, _alive = _calls()
    title = f"Calls, x[1, {SIZE}], W[{SIZE}, {SIZE}]"
    for mode, (context, requires_grad, backward) in MODES.items():
        x = torch.randn(1, SIZE).requires_grad_(requires_grad)
        # "a Python op" has no formula to go backward with.
        chosen = {n: c for n, c in calls.items() if not (backward and n == "a Python op")}
        ways = [Way(n, _loop(c, x, backward), times=LOOP) for n, c in chosen.items()]
        with context():
            found = run_cell(
                Cell("overhead", title, {"mode": mode}, ways), None, 5 if run.args.quick else 50
            )
        yield from found

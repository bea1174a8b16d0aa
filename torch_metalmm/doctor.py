"""What this machine runs, and whether each engine computes what the specification says.

One text to paste into a report: versions, the device, then a line per check. A check that fails
says why, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _C, formats
from .engines import check_device, engines
from .info import versions

_N, _K = 96, 512
_FORMATS = ("f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs", "mxfp4", "affine4_g64")
_MESSAGE_LINES = 60
_Prepared = tuple[Callable[[], Tensor], Callable[[Tensor], tuple[float, float]]]


@dataclass(frozen=True)
class Check:
    """A computation on a device: prepare() gives what is run and timed, and a judge of its result.

    The judge returns the error of the result and the largest that rounding explains.
    """

    name: str
    prepare: Callable[[], _Prepared]


@dataclass(frozen=True)
class Result:
    """A line of the report."""

    text: str
    ok: bool = True


def examine(device: str | None = None) -> Iterator[Result]:
    """The report, line by line as it is made; of one device ("mps"), or of all that run here.

    ValueError: the device is none of cpu, mps, cuda, or the ops do not run on it.
    """
    if device is not None:
        check_device(device)
    why = engines()
    yield from map(Result, versions())
    for name, absence in why.items():
        yield Result(f"{name:5} {absence or 'available'}")
    for name in [device] if device else [d for d, absence in why.items() if not absence]:
        yield Result(f"\n{name}: {', '.join(_device_facts(name))}")
        for check in _checks(name):
            yield _perform(check, name)


def _device_facts(device: str) -> Iterator[str]:
    if device == "cpu":
        yield f"{_C.cpu_isa()} of {', '.join(_C.cpu_isas())}; {torch.get_num_threads()} threads"
    elif device == "cuda":
        yield torch.cuda.get_device_name()
    else:
        facts = _C.mps_facts()
        yield f"{facts['name']}, planned for as {facts['plans_for']}"
        yield f"Apple{facts['family']}, {facts['cores']} cores, macOS {facts['macos']}"
        yield f"{facts['max_threadgroup_memory']} bytes and {facts['max_threads']} threads a group"
        yield f"kernels from {facts['archive'] or 'source, compiled when first used'}"


def _synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def _perform(check: Check, device: str) -> Result:
    """Runs a check twice, for the first may compile; the error is that of the second."""
    times = []
    try:
        call, judge = check.prepare()
        _synchronize(device)
        for _ in range(2):
            start = time.perf_counter()
            y = call()
            _synchronize(device)
            times.append(time.perf_counter() - start)
        error, bound = judge(y)
    except Exception as failure:
        lines = f"{type(failure).__name__}: {failure}".splitlines()[:_MESSAGE_LINES]
        return Result(f"FAIL  {check.name}: " + "\n      ".join(lines), ok=False)
    ok = error <= bound
    ratio = f"{error / bound:.2f} of its bound" if bound else f"{error:g}, must be 0"
    first, second = (f"{1e3 * t:.2f} ms" for t in times)
    text = f"{check.name:34} first {first:>10}  then {second:>9}  error {ratio}"
    return Result(f"{'ok  ' if ok else 'FAIL'}  {text}", ok)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _packed(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A packed weight [N, K] on the CPU and, in f64, what the specification decodes it to."""
    packed = formats.get(name).quantize(_random(_N, _K, seed=seed))
    return packed, formats.get(name).dequantize(packed, _K).double()


def _compare(y: Tensor, x: Tensor, w: Tensor, start: Tensor | None = None) -> tuple[float, float]:
    """y against x Wᵀ (+ start): the largest error over |x| |W|ᵀ, and what rounding may make of it.

    Every product and sum in f32, the weights and the result in the dtype of x.
    """
    x64 = x.cpu().double()
    want, scale = x64 @ w.T, x64.abs() @ w.abs().T
    if start is not None:
        want, scale = want + start.cpu().double(), scale + start.cpu().double().abs()
    error = ((y.cpu().double() - want).abs() / scale).max().item()
    return error, x.shape[-1] * 2.0**-23 + 2 * torch.finfo(x.dtype).eps


def _linear(device: str, name: str, m: int, dtype: torch.dtype, strategy: str | None) -> Check:
    def prepare() -> _Prepared:
        packed, w = _packed(name)
        x, bias = _random(m, _K, seed=1).to(dtype), _random(_N, seed=2).to(dtype)
        on_device = x.to(device), packed.to(device), bias.to(device)
        return (
            lambda: torch.ops.metalmm.linear(*on_device, name, strategy),
            lambda y: _compare(y, x, w, bias),
        )

    label = f"linear {name} {str(dtype)[6:]} M={m} {strategy or ''}"
    return Check(label.rstrip(), prepare)


def _views(device: str) -> Check:
    """Operands that begin inside their storage, x with rows apart, W at 2 bytes of alignment."""

    def prepare() -> _Prepared:
        packed, w = _packed("q4_0")
        table = torch.cat([packed[:3], packed]).to(device)[3:]
        x, bias = _random(5, _K + 3, seed=1).half(), _random(_N + 7, seed=2).half()
        view, addend = x.to(device)[1:, 3:], bias.to(device)[7:]
        return (
            lambda: torch.ops.metalmm.linear(view, table, addend, "q4_0"),
            lambda y: _compare(y, x[1:, 3:], w, bias[7:]),
        )

    return Check("views with offsets", prepare)


def _decoded(device: str, name: str) -> Check:
    def prepare() -> _Prepared:
        packed, w = _packed(name)
        rows = torch.tensor([_N - 1, 0, 5, 5])
        ids, weight = rows.to(device), packed.to(device)

        def call() -> Tensor:
            dense: Tensor = torch.ops.metalmm.dequantize(weight, name, _K)
            return torch.cat([dense, torch.ops.metalmm.embedding(ids, weight, name, _K)])

        want = torch.cat([w, w[rows]])
        return call, lambda y: ((y.cpu().double() - want).abs().max().item(), 0.0)

    return Check(f"dequantize, embedding {name}", prepare)


def _gradient(device: str) -> Check:
    def prepare() -> _Prepared:
        packed, w = _packed("q4_k")
        x = _random(4, _K, seed=1).to(device).requires_grad_()
        weight, grad = packed.to(device), _random(4, _N, seed=2)
        on_device = grad.to(device)

        def call() -> Tensor:
            y = torch.ops.metalmm.linear(x, weight, None, "q4_k")
            return torch.autograd.grad(y, x, on_device)[0]

        return call, lambda y: _compare(y, grad, w.T)

    return Check("gradient of x", prepare)


def _swiglu(device: str) -> Check:
    def prepare() -> _Prepared:
        (gate, gate_w), (up, up_w), x = _packed("q4_0", 3), _packed("q4_0", 4), _random(1, _K)
        on_device = x.to(device), gate.to(device), up.to(device)
        g, u = x.double() @ gate_w.T, x.double() @ up_w.T
        want = torch.nn.functional.silu(g) * u
        scale = (x.double().abs() @ gate_w.abs().T) * (x.double().abs() @ up_w.abs().T)
        bound = 4 * _K * 2.0**-23
        return (
            lambda: torch.ops.metalmm.swiglu(*on_device, "q4_0", "q4_0"),
            lambda y: (((y.cpu().double() - want).abs() / scale).max().item(), bound),
        )

    return Check("swiglu q4_0", prepare)


def _threads(device: str) -> Check:
    """Four threads at once, each with its own rows of x; no other check compiles their kernels."""

    def prepare() -> _Prepared:
        packed, w = _packed("q5_1")
        weight, x = packed.to(device), _random(53, _K, seed=1)
        parts = torch.split(x.to(device), [1, 3, 9, 40])

        def call() -> Tensor:
            with ThreadPoolExecutor(len(parts)) as pool:
                run = lambda part: torch.ops.metalmm.linear(part, weight, None, "q5_1")  # noqa: E731
                return torch.cat(list(pool.map(run, parts)))

        return call, lambda y: _compare(y, x, w)

    return Check("four threads", prepare)


def _signposts() -> Check:
    """While torch records signposts, every kernel is announced to its profiler."""
    check = _linear("mps", "q4_0", 1, torch.float16, None)

    def prepare() -> _Prepared:
        inner, judge = check.prepare()

        def call() -> Tensor:
            with torch.mps.profiler.profile(mode="interval", wait_until_completed=True):
                return inner()

        return call, judge

    return Check("signposts of torch.mps.profiler", prepare)


def _checks(device: str) -> Iterator[Check]:
    half = torch.float16
    if device != "cpu":
        for strategy in _C.strategies("linear"):
            yield _linear(device, "q4_0", 3, half, strategy)
    for name in _FORMATS:
        yield _linear(device, name, 1, half, None)
    for dtype in (torch.float32, torch.bfloat16):
        for m in (1, 7, 65):
            yield _linear(device, "q4_k", m, dtype, None)
    for name in ("q4_0", "q6_k", "affine4_g64"):
        yield _decoded(device, name)
    yield _views(device)
    yield _swiglu(device)
    yield _gradient(device)
    yield _threads(device)
    if device == "mps":
        yield _signposts()

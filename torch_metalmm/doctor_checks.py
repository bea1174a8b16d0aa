"""What `metalmm doctor` computes on a device, and what it compares the results with.

Every reference is the specification (torch_metalmm.formats) and float64 on the CPU, none the engine
under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _C, formats

_N, _K = 96, 512
_FORMATS = ("f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs", "mxfp4", "affine4_g64")


class Skipped(Exception):
    """A check that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Found:
    """The error of a result, the largest that rounding explains, and what else to tell."""

    error: float
    bound: float
    note: str = ""


Prepared = tuple[Callable[[], Tensor], Callable[[Tensor], Found]]


@dataclass(frozen=True)
class Check:
    """A computation on a device: prepare() gives what is run and timed, and a judge of its result.

    prepare() raises Skipped where this machine cannot run it. heavy: it takes seconds on a CPU, or
    gigabytes.
    """

    name: str
    prepare: Callable[[], Prepared]
    heavy: bool = False


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, f32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_and_decoded(name: str, n: int = _N, k: int = _K, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A packed weight [n, k] on the CPU and, in f64, what the specification decodes it to."""
    packed = formats.get(name).quantize(random(n, k, seed=seed))
    return packed, formats.get(name).dequantize(packed, k).double()


def compare(y: Tensor, x: Tensor, w: Tensor, start: Tensor | None = None) -> Found:
    """y against x Wᵀ (+ start): the largest error over |x| |W|ᵀ, and what rounding may make of it.

    Every product and sum in f32, the weights and the result in the dtype of x.
    """
    x64 = x.cpu().double()
    want, scale = x64 @ w.T, x64.abs() @ w.abs().T
    if start is not None:
        want, scale = want + start.cpu().double(), scale + start.cpu().double().abs()
    return _worst(y, want, scale, x.shape[-1] * 2.0**-23 + 2 * torch.finfo(x.dtype).eps)


def exactly(y: Tensor, want: Tensor) -> Found:
    """y against values that are stored and loaded, not computed."""
    return _worst(y, want.double(), torch.ones_like(want, dtype=torch.float64), 0.0)


def _worst(y: Tensor, want: Tensor, scale: Tensor, bound: float) -> Found:
    """The largest |y - want| / scale; where it is too large, the element that has it, in words."""
    given = y.cpu().double()
    errors = torch.nan_to_num((given - want).abs() / scale, nan=torch.inf)
    error = errors.max().item()
    if error <= bound:
        return Found(error, bound)
    at = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]
    wrong, all_of = int((errors > bound).sum()), errors.numel()
    pair = given[tuple(at)].item(), want[tuple(at)].item()
    note = f"{wrong} of {all_of} values, the worst at {at}: {pair[0]:.9g}, not {pair[1]:.9g}"
    return Found(error, bound, note)


def _linear(
    device: str,
    name: str,
    m: int,
    dtype: torch.dtype,
    strategy: str | None = None,
    n: int = _N,
    k: int = _K,
) -> Check:
    def prepare() -> Prepared:
        packed, w = packed_and_decoded(name, n, k)
        x, bias = random(m, k, seed=1).to(dtype), random(n, seed=2).to(dtype)
        on_device = x.to(device), packed.to(device), bias.to(device)
        return (
            lambda: torch.ops.metalmm.linear(*on_device, name, strategy),
            lambda y: compare(y, x, w, bias),
        )

    sizes = [f"M={m}", *([f"N={n}"] if n != _N else []), *([f"K={k}"] if k != _K else [])]
    label = f"linear {name} {str(dtype)[6:]} {' '.join(sizes)} {strategy or ''}"
    return Check(label.rstrip(), prepare)


def _views(device: str) -> Check:
    """Operands that begin inside their storage, x with rows apart, W at 2 bytes of alignment."""

    def prepare() -> Prepared:
        packed, w = packed_and_decoded("q4_0")
        table = torch.cat([packed[:3], packed]).to(device)[3:]
        x, bias = random(5, _K + 3, seed=1).half(), random(_N + 7, seed=2).half()
        view, addend = x.to(device)[1:, 3:], bias.to(device)[7:]
        return (
            lambda: torch.ops.metalmm.linear(view, table, addend, "q4_0"),
            lambda y: compare(y, x[1:, 3:], w, bias[7:]),
        )

    return Check("views with offsets", prepare)


def _decoded(device: str, name: str) -> Check:
    def prepare() -> Prepared:
        packed, w = packed_and_decoded(name)
        rows = torch.tensor([_N - 1, 0, 5, 5])
        ids, weight = rows.to(device), packed.to(device)

        def call() -> Tensor:
            dense: Tensor = torch.ops.metalmm.dequantize(weight, name, _K)
            return torch.cat([dense, torch.ops.metalmm.embedding(ids, weight, name, _K)])

        return call, lambda y: exactly(y, torch.cat([w, w[rows]]))

    return Check(f"dequantize, embedding {name}", prepare)


def _gradient(device: str) -> Check:
    def prepare() -> Prepared:
        packed, w = packed_and_decoded("q4_k")
        x = random(4, _K, seed=1).to(device).requires_grad_()
        weight, grad = packed.to(device), random(4, _N, seed=2)
        on_device = grad.to(device)

        def call() -> Tensor:
            y = torch.ops.metalmm.linear(x, weight, None, "q4_k")
            return torch.autograd.grad(y, x, on_device)[0]

        return call, lambda y: compare(y, grad, w.T)

    return Check("gradient of x", prepare)


def _swiglu(device: str) -> Check:
    def prepare() -> Prepared:
        (gate, gate_w), (up, up_w) = (packed_and_decoded("q4_0", seed=seed) for seed in (3, 4))
        x = random(1, _K)
        on_device = x.to(device), gate.to(device), up.to(device)
        g, u = x.double() @ gate_w.T, x.double() @ up_w.T
        want = torch.nn.functional.silu(g) * u
        scale = (x.double().abs() @ gate_w.abs().T) * (x.double().abs() @ up_w.abs().T)
        bound = 4 * _K * 2.0**-23
        return (
            lambda: torch.ops.metalmm.swiglu(*on_device, "q4_0", "q4_0"),
            lambda y: _worst(y, want, scale, bound),
        )

    return Check("swiglu q4_0", prepare)


def _threads(device: str) -> Check:
    """Four threads at once, each with its own rows of x; no other check compiles their kernels."""

    def prepare() -> Prepared:
        packed, w = packed_and_decoded("q5_1")
        weight, x = packed.to(device), random(53, _K, seed=1)
        parts = torch.split(x.to(device), [1, 3, 9, 40])

        def call() -> Tensor:
            with ThreadPoolExecutor(len(parts)) as pool:
                run = lambda part: torch.ops.metalmm.linear(part, weight, None, "q5_1")  # noqa: E731
                return torch.cat(list(pool.map(run, parts)))

        return call, lambda y: compare(y, x, w)

    return Check("four threads", prepare)


def _signposts() -> Check:
    """While torch records signposts, every kernel is announced to its profiler."""
    check = _linear("mps", "q4_0", 1, torch.float16)

    def prepare() -> Prepared:
        inner, judge = check.prepare()

        def call() -> Tensor:
            with torch.mps.profiler.profile(mode="interval", wait_until_completed=True):
                return inner()

        return call, judge

    return Check("signposts of torch.mps.profiler", prepare)


def checks(device: str) -> Iterator[Check]:
    """Those of a device, the plain ones first."""
    from .doctor_large import beyond_4_gib, generation, speed

    half = torch.float16
    if device != "cpu":
        for strategy in _C.strategies("linear"):
            yield _linear(device, "q4_0", 3, half, strategy)
    for name in _FORMATS:
        yield _linear(device, name, 1, half)
    for dtype in (torch.float32, torch.bfloat16):
        for m in (1, 7, 65):
            yield _linear(device, "q4_k", m, dtype)
    # N and K that no tile divides; K of a dense format need not even be even.
    for m in (1, 7, 65):
        yield _linear(device, "q4_k", m, half, n=97)
    for name, dtype in (("f16", half), ("bf16", torch.bfloat16), ("f32", torch.float32)):
        for m in (1, 65):
            yield _linear(device, name, m, dtype, n=97, k=1061)
    for name in ("q4_0", "q6_k", "affine4_g64"):
        yield _decoded(device, name)
    yield _views(device)
    yield _swiglu(device)
    yield _gradient(device)
    yield _threads(device)
    if device == "mps":
        yield _signposts()
    yield beyond_4_gib(device)
    yield generation(device)
    yield speed(device)

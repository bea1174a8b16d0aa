"""The checks of `metalmm doctor` on a device: those of the kernels, and the list of all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ... import _C
from .compare import (
    Check,
    K,
    N,
    Prepared,
    compare,
    exactly,
    packed_and_decoded,
    random,
    worst,
)
from .large import MEASURED, TOKENS, beyond_4_gib, generation, loading, speed

_FORMATS = ("f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs", "mxfp4", "affine4_g64")


def _linear(
    device: str,
    name: str,
    m: int,
    dtype: torch.dtype,
    strategy: str | None = None,
    n: int = N,
    k: int = K,
) -> Check:
    def prepare() -> Prepared:
        packed, w = packed_and_decoded(name, n, k)
        x, bias = random(m, k, seed=1).to(dtype), random(n, seed=2).to(dtype)
        on_device = x.to(device), packed.to(device), bias.to(device)
        return (
            lambda: torch.ops.metalmm.linear(*on_device, name, strategy),
            lambda y: compare(y, x, w, bias),
        )

    sizes = [f"M={m}", *([f"N={n}"] if n != N else []), *([f"K={k}"] if k != K else [])]
    label = f"linear {name} {str(dtype)[6:]} {' '.join(sizes)} {strategy or ''}"
    return Check(label.rstrip(), prepare)


def _views(device: str) -> Prepared:
    """Operands that begin inside their storage, x with rows apart, W at 2 bytes of alignment."""
    packed, w = packed_and_decoded("q4_0")
    table = torch.cat([packed[:3], packed]).to(device)[3:]
    x, bias = random(5, K + 3, seed=1).half(), random(N + 7, seed=2).half()
    view, addend = x.to(device)[1:, 3:], bias.to(device)[7:]
    return (
        lambda: torch.ops.metalmm.linear(view, table, addend, "q4_0"),
        lambda y: compare(y, x[1:, 3:], w, bias[7:]),
    )


def _decoded(device: str, name: str) -> Prepared:
    packed, w = packed_and_decoded(name)
    rows = torch.tensor([N - 1, 0, 5, 5])
    ids, weight = rows.to(device), packed.to(device)

    def call() -> Tensor:
        dense: Tensor = torch.ops.metalmm.dequantize(weight, name, K)
        return torch.cat([dense, torch.ops.metalmm.embedding(ids, weight, name, K)])

    return call, lambda y: exactly(y, torch.cat([w, w[rows]]))


def _gradient(device: str) -> Prepared:
    packed, w = packed_and_decoded("q4_k")
    x = random(4, K, seed=1).to(device).requires_grad_()
    weight, grad = packed.to(device), random(4, N, seed=2)
    on_device = grad.to(device)

    def call() -> Tensor:
        y = torch.ops.metalmm.linear(x, weight, None, "q4_k")
        return torch.autograd.grad(y, x, on_device)[0]

    return call, lambda y: compare(y, grad, w.T)


def _swiglu(device: str) -> Prepared:
    (gate, gate_w), (up, up_w) = (packed_and_decoded("q4_0", seed=seed) for seed in (3, 4))
    x = random(1, K)
    on_device = x.to(device), gate.to(device), up.to(device)
    g, u = x.double() @ gate_w.T, x.double() @ up_w.T
    want = torch.nn.functional.silu(g) * u
    scale = (x.double().abs() @ gate_w.abs().T) * (x.double().abs() @ up_w.abs().T)
    bound = 4 * K * 2.0**-23
    return (
        lambda: torch.ops.metalmm.swiglu(*on_device, "q4_0", "q4_0"),
        lambda y: worst(y, want, scale, bound),
    )


def _threads(device: str) -> Prepared:
    """Four threads at once, each with its own rows of x; no other check compiles their kernels."""
    packed, w = packed_and_decoded("q5_1")
    weight, x = packed.to(device), random(53, K, seed=1)
    parts = torch.split(x.to(device), [1, 3, 9, 40])

    def call() -> Tensor:
        with ThreadPoolExecutor(len(parts)) as pool:
            run = lambda part: torch.ops.metalmm.linear(part, weight, None, "q5_1")  # noqa: E731
            return torch.cat(list(pool.map(run, parts)))

    return call, lambda y: compare(y, x, w)


def _signposts() -> Prepared:
    """While torch records signposts, every kernel is announced to its profiler."""
    inner, judge = _linear("mps", "q4_0", 1, torch.float16).prepare()

    def call() -> Tensor:
        with torch.mps.profiler.profile(mode="interval", wait_until_completed=True):
            return inner()

    return call, judge


def checks(device: str) -> Iterator[Check]:
    """The checks of a device, the plain ones first."""
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
        yield Check(f"dequantize, embedding {name}", partial(_decoded, device, name))
    for label, of in (
        ("views with offsets", _views),
        ("swiglu q4_0", _swiglu),
        ("gradient of x", _gradient),
        ("four threads", _threads),
    ):
        yield Check(label, partial(of, device))
    if device == "mps":
        yield Check("signposts of torch.mps.profiler", _signposts)
    for label, of in (
        ("loading a mapped file", loading),
        ("rows beyond 4 GiB", beyond_4_gib),
        (f"{TOKENS} tokens of a model", generation),
        (f"speed of q4_k {'x'.join(map(str, MEASURED))}, M=1", speed),
    ):
        yield Check(label, partial(of, device), heavy=True)

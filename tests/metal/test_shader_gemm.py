"""The matrix kernels of metal/ on the lockstep emulator: the decode of each format, offsets beyond
32 bits, barriers. tests/ops has their products."""

from __future__ import annotations

import mmap

import plan_cases
import pytest
import shaders
import torch
from backends import compiled_dtype
from inputs import activations, random_weight
from oracle import FORMATS, Value, check, spec
from places import ROOT
from shaders import arranged_of, launch, linear
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.testing import EmulatorFault, MetalSource

pytestmark = pytest.mark.shaders

STRATEGIES = tuple(name for name in plan_cases.STRATEGIES if name.startswith("gemm"))
METAL = ROOT / "metal"


def expected(strategy: str, x: Tensor, w: Tensor) -> Value:
    """x Wᵀ in f32, as the strategy computes it: the matrix kernels round W to f16 for f16 x."""
    halved = _C.strategy(strategy)["rounds_to_half"] and x.dtype == torch.float16
    return Value.of(x).dot(w, halved=halved)


def some_k(name: str) -> int:
    """More than two steps of every kernel, with a tail where the format has one."""
    block = formats.get(name).block_values
    return {1: 291, 32: 288, 64: 320}.get(block, 2 * block)


@pytest.mark.every_format
@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_gives_the_weight(name: str) -> None:
    """A row of x picks a value of every row of W: the output is W, rounded once to the dtype.

    Each place of a block is picked in every other block. For f16, affine4 may round the exact value
    instead of that of f32: no weight here differs. The other kernels: tests/ops/test_exact.py.
    """
    k, dtype = some_k(name), compiled_dtype(name, "gemm")
    packed, block = random_weight(name, 3, k), formats.get(name).block_values
    at = [i for i in range(k) if (i // block + i) % 2 == 0]
    y = linear("gemm", name, packed, torch.eye(k, dtype=dtype)[at])
    want = spec(name, packed, k).T[at].to(dtype)
    assert torch.equal(y, want), (dtype, (y != want).nonzero()[:3].tolist())


@pytest.mark.parametrize("kernel", ("gemm", "gemm_small"))
def test_affine4_in_halves(kernel: str) -> None:
    """Scales and biases of both signs and of every exponent, up to 2^11: the weights, rounded once
    from the exact value or from the specification's f32 value."""
    random, k = torch.Generator().manual_seed(0), 64 * 32
    exponents = torch.stack([torch.arange(64), torch.arange(64) * 7 + 3]) % 26 << 10
    bits = exponents + torch.randint(0, 1 << 10, (2, 64), generator=random)
    bits += torch.randint(0, 2, (2, 64), generator=random) << 15
    scales = bits.to(torch.int32).to(torch.uint16).view(torch.float16)
    codes = random_weight("affine4_g32", 1, k)[:, : k // 2]
    packed = torch.cat([codes.flatten(), scales.view(torch.uint8).flatten()])[None]
    w = spec("affine4_g32", packed, k)[0]
    some = torch.arange(0, k, 3)  # 10 or 11 of each group, of both nibbles of a byte
    y = linear(kernel, "affine4_g32", packed, torch.eye(k, dtype=torch.float16)[some])[:, 0]
    nibbles = torch.stack([codes[0] & 15, codes[0] >> 4], 1).double().view(64, 32)
    exact = (nibbles * scales[0].double()[:, None] + scales[1].double()[:, None]).flatten()[some]
    once = torch.from_numpy(exact.numpy().astype("float16"))  # torch rounds to f32 first
    w = w[some]
    assert w.abs().max() > 1e4 and ((w != 0) & (w.abs() < 2**-14)).any()
    assert bool(((y == once) | (y == w.half())).all())


def far_apart(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    size = count * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


@pytest.mark.parametrize("kernel", STRATEGIES)
def test_offsets_beyond_32_bits(kernel: str) -> None:
    """Rows of x, W and y 2^30 elements apart: offsets pass 2^32 bytes, and elements 2^31."""
    m, n, k, stride = 9, 6, 64, 2**30
    packed, x = random_weight("q8_0", n, k), activations(m, k, dtype=torch.float16)
    memory = {"weight": far_apart((n - 1) * stride + packed.shape[1], torch.uint8)}
    memory |= {s: far_apart((m - 1) * stride + k, x.dtype) for s in ("x", "y")}
    memory["x"].as_strided(x.shape, (stride, 1)).copy_(x)
    memory["weight"].as_strided(packed.shape, (stride, 1)).copy_(packed)
    strides = {"x_stride": stride, "w_stride": stride, "y_stride": stride}
    plan = _C.plan(m=m, n=n, k=k, format="q8_0", chip="m1", strategy=kernel, **strides)
    unbound = torch.full((1,), torch.nan)
    memory |= {"bias": unbound, "c": unbound, "y2": arranged_of(plan)}
    for one in plan["passes"]:
        launch(one, memory, "ascending")
    want = expected(kernel, x, spec("q8_0", packed, k)).store(x.dtype)
    check(memory["y"].as_strided((m, n), (stride, 1)), want, kernel)


@pytest.mark.parametrize(("kernel", "barrier"), (("gemm", 0), ("gemm_tiled", 0), ("gemm_tiled", 1)))
def test_every_barrier_is_needed(
    kernel: str, barrier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one barrier of the main loop the emulator reports a race; with all, none."""
    call = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    pieces = (METAL / "kernels" / f"{kernel}.h").read_text().split(call)
    text = call.join(pieces[: barrier + 1]) + call.join(["", *pieces[barrier + 1 :]])[len(call) :]
    assert text.count(call) == len(pieces) - 2
    text = text.replace("#pragma once", "").replace('"../', '"')
    struct = {"gemm": "Gemm", "gemm_tiled": "GemmTiled"}[kernel]
    text += f'#include "formats/all.h"\nMM_MATMUL(f32, float, {kernel}, q4_0, Q4_0, {struct})\n'
    library = MetalSource(text, include=[METAL]).library
    monkeypatch.setattr(shaders, "shader_library", lambda _: library)
    with pytest.raises(EmulatorFault) as fault:
        linear(kernel, "q4_0", random_weight("q4_0", 64, 96), activations(32, 96))
    assert fault.value.kind in ("race", "uninitialized"), fault.value

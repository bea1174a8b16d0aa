"""Kernel by kernel, an NVIDIA GPU against the emulator: the same text, compiled twice.

The reductions of both add in one order, so results are equal bit for bit, except where the tensor
cores multiply and where exp is another function.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from format_cases import same_bits
from inputs import activations, random_weight
from kernel_cases import PER_KERNEL, Case, case, emulate, planned_kernels
from layer_oracle import activated
from oracle import Value
from plan_cases import DTYPES, STRATEGIES, strategy_of
from torch import Tensor

from torch_metalmm import _C

KERNELS = _C.kernel_names()

# A product on the tensor cores takes 8 terms at a time: the terms and the sum so far are aligned to
# the largest of them and cut off at 2^-23 of it, 9 * 2 u of the sum of their sizes. K terms take
# K / 8 such steps: as many roundings as a chain of 18 K / 8.
TENSOR_CORE_CHAIN = 18 / 8


@pytest.mark.parametrize("kernels_of", STRATEGIES)
def test_the_cases_run_their_kernel(kernels_of: str) -> None:
    for kernel in KERNELS:
        if strategy_of(kernel) == kernels_of:
            one = case(kernel, 0)
            assert kernel in planned_kernels(one)


@cache
def recorded() -> dict[str, list[Tensor]]:
    """The emulator's results from the file METALMM_EMULATED, which kernel_cases.py writes."""
    file = os.environ.get("METALMM_EMULATED")
    return torch.load(file) if file else {}


def expected(one: Case, chain: float) -> Value:
    """A matmul or one half of a gated MLP; a term takes chain * K roundings."""
    strategy, dtype = strategy_of(one.kernel), one.x[0].dtype
    k = round(chain * one.x[0].shape[-1])
    x = Value.of(one.x[0])
    if strategy in ("swiglu_up", "act_mul"):
        in_tiles = strategy == "act_mul" and dtype == torch.float16
        gate, up = (x.dot(w.half() if in_tiles else w, k) for w in one.weights)
        return (activated(gate, one.activation) * up).store(dtype)
    if strategy == "swiglu_down":
        hidden = activated(x, one.activation) * Value.of(one.x[1])
        return hidden.dot(one.weights[0], k).store(dtype)
    y = x.dot(one.weights[0].half(), k)  # f16 tiles
    if one.scales:
        alpha, beta = one.scales
        return (y * alpha + Value.of(one.x[1]) * beta).store(dtype)
    return (y + Value.of(one.x[1])).store(dtype)


def agree(one: Case, emulator: Tensor, gpu: Tensor) -> bool:
    """Equal, or within what both may be off."""
    assert gpu.dtype == emulator.dtype and gpu.shape == emulator.shape
    strategy = strategy_of(one.kernel)
    in_tiles = strategy == "act_mul" or _C.strategy(strategy)["rounds_to_half"]  # cases of gemm
    on_tensor_cores = in_tiles and one.x[0].dtype == torch.float16
    if not on_tensor_cores and strategy not in ("swiglu_up", "swiglu_down", "act_mul"):
        return same_bits(emulator.float(), gpu.float())
    error = (
        expected(one, 1).error + expected(one, TENSOR_CORE_CHAIN if on_tensor_cores else 1).error
    )
    close = (emulator.double() - gpu.double()).abs() <= error
    return bool((close | (emulator == gpu)).all())  # equal: also beyond the range of f16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels_of", STRATEGIES)
def test_emulator_and_gpu_agree(kernels_of: str, dtype: str) -> None:
    wrong = []
    for kernel in KERNELS:
        if strategy_of(kernel) != kernels_of or not kernel.endswith(f"_{dtype}"):
            continue
        emulator = recorded().get(kernel) or emulate(kernel)
        for i in range(PER_KERNEL):
            one = case(kernel, i)
            if not agree(one, emulator[i], one.run(lambda t: t.cuda()).cpu()):
                wrong.append((kernel, i))
    assert wrong == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("kernel", ("gemv", "gemv_wide_n", "gemm_small", "gemm"))
@pytest.mark.parametrize("name", ("q4_k", "affine4_g64", "q6_k"))
def test_a_grid_larger_than_the_gpu(name: str, kernel: str) -> None:
    """The launcher gives a larger grid a kernel with fewer registers, where fewer registers spill
    next to nothing (some of these cases): the same arithmetic and bits."""
    n, part, k = 1 << 16, 1 << 12, 512
    packed = random_weight(name, n, k).cuda()
    m = {"gemm_small": 16, "gemm": 64}.get(kernel, 1)
    x = activations(m, k, dtype=torch.float16).cuda()

    def linear(w: Tensor) -> Tensor:
        return torch.ops.metalmm.linear(x, w, None, name, strategy=kernel)

    parts = torch.cat([linear(w) for w in packed.split(part)], dim=1)
    assert torch.equal(linear(packed), parts)

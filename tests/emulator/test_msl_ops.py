"""torch.ops.metalmm on the emulator: from tensors to kernels, as every GPU engine goes."""

from __future__ import annotations

import pytest
import torch
from inputs import activations
from oracle import Value, check

from torch_metalmm import _C, formats
from torch_metalmm.testing import MetalSource, emulated

ops = torch.ops.metalmm
N, K = 37, 256


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers: sums of products are exact in every order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def packed(name: str, seed: int = 0) -> torch.Tensor:
    return formats.get(name).quantize(integers(N, K, seed=seed))


def test_a_strategy_is_forced_and_the_native_ops_come_back() -> None:
    w, x = packed("q4_k"), integers(4, K, seed=1)
    want = ops.linear(x, w, None, "q4_k")
    with emulated():
        for strategy in ("gemm", "gemm_tiled", "gemv_batched", "gemm_naive"):
            y = ops.linear(x, w, None, "q4_k", strategy)
            assert torch.allclose(y, want, rtol=1e-5, atol=1e-3)
        with pytest.raises(ValueError, match="gemm_small"):
            ops.linear(x, w, None, "q4_k", "nonsense")
    with pytest.raises(ValueError, match="gemm_small"):
        ops.linear(x, w, None, "q4_k", "gemm_small")
    assert torch.equal(ops.linear(x, w, None, "q4_k"), want)


def test_split_k_uses_the_workspace() -> None:
    w = formats.get("q4_k").quantize(integers(N, 2048, seed=3))
    x = integers(1, 2048, seed=1)
    with emulated(checked=True, chip="m4-max", cores=40):
        y = ops.linear(x, w, None, "q4_k", "split_reduce")
    assert torch.allclose(y, ops.linear(x, w, None, "q4_k"), rtol=1e-5, atol=1e-2)


def test_split_k_of_swiglu() -> None:
    """Gate and up by split-K: partial sums of half tiles, added to f32 gate and up."""
    m, n, k = 40, 9, 2048
    sizes = {"m": m, "n": n, "k": k, "format": "f16", "dtype": "f16"}
    plan = _C.plan(chip="m4-max", y_f32=True, **sizes)
    assert [one["kernel"] for one in plan["passes"]][1:] == ["split_reduce_f32"]
    gate, up = (activations(n, k, seed=s).half() for s in ("gate", "up"))
    x = activations(m, k).div(8).half()
    a, b = (Value.of(x).dot(w, halved=True) for w in (gate, up))
    with emulated(checked=True, chip="m4-max"):
        y = ops.swiglu(x, gate, up, "f16", "f16")
    check(y, (a.silu() * b).store(torch.float16), "swiglu by split-K")


FAULTS = {
    "y[1 << 20] = 1;": r"faulty\.metal:5: out of bounds: writes 4 bytes",
    "t[i] = 1; t[i ^ 1] = i + 2; y[i] = t[i];": (
        r"faulty\.metal:5: missing barrier.*other at faulty\.metal:5\)"
    ),
    "if (i == 0) simd_sum(i); y[i] = 1;": r"faulty\.metal:5: divergent collective",
}


@pytest.mark.parametrize("statement", FAULTS)
def test_a_fault_of_an_op_names_its_line(statement: str) -> None:
    """A wrong kernel stands in the place of a kernel of metal/."""
    faulty = MetalSource(
        f"""#include <metal_stdlib>
using namespace metal;
kernel void dequantize_q8_0_f32(device float* y [[buffer(2)]],
                                uint i [[thread_index_in_threadgroup]]) {{ threadgroup uint t[1024];
  {statement}
}}""",
        name="faulty.metal",
    )
    with emulated(checked=True):
        _C.load_emulated(str(faulty.library.path))
        with pytest.raises(RuntimeError, match=FAULTS[statement]) as caught:
            ops.dequantize(packed("q8_0"), "q8_0", dtype=torch.float32)
    assert "[dequantize_q8_0_f32, threadgroup (0, 0, 0), simdgroup " in str(caught.value)
    with emulated(checked=True):  # the real one again
        assert ops.dequantize(packed("q8_0"), "q8_0").shape == (N, K)


@pytest.mark.parametrize(
    ("file", "message"),
    [("no_such_file.so", "no_such_file"), (_C.__file__, "_C.* is no library of shaders")],
)
def test_a_library_that_is_none(file: str, message: str) -> None:
    for load in (_C.load_emulated, _C.ShaderLibrary):
        with pytest.raises(RuntimeError, match=message):
            load(file)

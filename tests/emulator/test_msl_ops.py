"""torch.ops.metalmm on the emulator: from tensors to kernels, as every GPU engine goes."""

from __future__ import annotations

import pytest
import torch
from inputs import activations, random_weight
from oracle import Value, check

from torch_metalmm import _C
from torch_metalmm.testing import MetalSource, emulated

ops = torch.ops.metalmm
N, K = 37, 256


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
            ops.dequantize(random_weight("q8_0", N, K), "q8_0", dtype=torch.float32)
    assert "[dequantize_q8_0_f32, threadgroup (0, 0, 0), simdgroup " in str(caught.value)
    with emulated(checked=True):  # the real one again
        assert ops.dequantize(random_weight("q8_0", N, K), "q8_0").shape == (N, K)


@pytest.mark.parametrize(
    ("file", "message"),
    [("no_such_file.so", "no_such_file"), (_C.__file__, "_C.* is no library of shaders")],
)
def test_a_library_that_is_none(file: str, message: str) -> None:
    for load in (_C.load_emulated, _C.ShaderLibrary):
        with pytest.raises(RuntimeError, match=message):
            load(file)

"""What training needs: frozen packed weights, bounded memory, autocast, adapters that learn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import EMULATOR, Backend, leaf
from inputs import activations, random_weight
from places import ROOT

ops = torch.ops.metalmm


def above_the_engine(backend: Backend) -> None:
    """What torch dispatches before an engine is asked is on the emulator as on the CPU."""
    if backend is EMULATOR:
        pytest.skip("as on the CPU")


def test_dense_weights_that_require_grad_are_taken_under_no_grad(backend: Backend) -> None:
    """tests/ops/test_errors.py: they are refused where the gradient would be recorded."""
    above_the_engine(backend)
    w = leaf(torch.randn(4, 8), backend)
    x = leaf(torch.randn(2, 8), backend)
    calls = (
        lambda w: ops.linear(x, w, None, "f32"),
        lambda w: ops.gemm(x, w, "f32"),
        lambda w: ops.gemv(x[0], w, "f32"),
        lambda w: ops.swiglu_linear(x, x, w, None, "f32"),
        lambda w: ops.swiglu(x, w, w, "f32", "f32"),
    )
    for f in calls:
        assert f(w.detach()).requires_grad
        with torch.no_grad():
            assert torch.equal(f(w), f(w.detach()))


def test_only_what_is_asked_for_is_recorded(backend: Backend) -> None:
    """No graph without a gradient to record, under no_grad and under inference_mode."""
    above_the_engine(backend)
    w, x = backend.put(random_weight("q4_0", 3, 32)), leaf(torch.randn(2, 32), backend)
    assert ops.linear(x, w, None, "q4_0").requires_grad
    assert not ops.linear(x.detach(), w, None, "q4_0").requires_grad
    bias = leaf(torch.randn(3), backend)
    y = ops.linear(x.detach(), w, bias, "q4_0")
    assert torch.autograd.grad(y.sum(), [bias])[0].tolist() == [2, 2, 2]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not ops.linear(x, w, bias, "q4_0").requires_grad
            assert not ops.swiglu(x, w, w, "q4_0", "q4_0").requires_grad
            assert torch.equal(ops.linear(x, w, bias, "q4_0"), ops.linear(x, w, bias, "q4_0"))
    assert not ops.dequantize(w, "q4_0").requires_grad


MEMORY = """
import sys, torch
sys.path[:0] = ["tests/support", "."]
from inputs import random_weight
from torch_metalmm.tools.generate import peak_memory
ops = torch.ops.metalmm
n, k = 32768, 4096  # dense, 512 MiB
rows = torch.cat([random_weight("q4_0", 64, k)] * (n // 64))
def step(w, m):
    x = torch.ones(m, k, requires_grad=True)
    ops.linear(x, w, None, "q4_0").sum().backward()
    half = w[: len(w) // 2]
    ops.swiglu(x, half, half, "q4_0", "q4_0").sum().backward()
    return x.grad
step(rows[:256], 2)
before = peak_memory()
step(rows, 2)
print(peak_memory() - before)
"""


def test_the_dense_weight_never_exists() -> None:
    """Forward and backward of a layer of 512 MiB in f32 take below 150 MB beside its bytes."""
    path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    print(f"{int(run.stdout) / 1e6:.0f} MB")
    assert int(run.stdout) < 150e6


# ---- training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_lowers_the_activations(dtype: torch.dtype, backend: Backend) -> None:
    """Under autocast every op computes as with x in the autocast dtype; gradients are x's own."""
    above_the_engine(backend)
    w, x = backend.put(random_weight("q8_0", 64, 64)), leaf(activations(3, 64), backend)
    bias, c = backend.put(activations(64, seed="bias")), backend.put(activations(3, 64, seed="c"))
    calls = (
        lambda x: ops.linear(x, w, None, "q8_0"),
        lambda x: ops.linear(x, w, bias, "q8_0"),
        lambda x: ops.linear(x, w, None, "q8_0", backend.strategies[0]),
        lambda x: ops.swiglu(x, w, w, "q8_0", "q8_0"),
        lambda x: ops.swiglu_linear(x, x, w, bias, "q8_0"),
        lambda x: ops.gemm(x, w, "q8_0", c, 2.0, 0.5),
        lambda x: ops.gemv(x[0], w, "q8_0"),
    )
    for f in calls:
        lowered = x.detach().to(dtype).requires_grad_()
        want = f(lowered)
        assert want.dtype == dtype
        with torch.autocast(backend.device, dtype):
            y = f(x)
            with torch.autocast(backend.device, enabled=False):
                assert f(x).dtype == torch.float32
        assert y.dtype == dtype and torch.equal(y, want)
        g = torch.ones_like(y)
        (dx,), (dlow,) = torch.autograd.grad(y, x, g), torch.autograd.grad(want, lowered, g)
        assert dx.dtype == torch.float32 and torch.equal(dx, dlow.float())
    with torch.autocast(backend.device, dtype):
        assert ops.dequantize(w, "q8_0").dtype == torch.float32
        ids = backend.put(torch.tensor([1]))
        assert ops.embedding(ids, w, "q8_0", dtype=torch.float16).dtype == torch.float16

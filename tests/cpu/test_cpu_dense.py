"""torch's matmul on the CPU: when it is chosen, and W decoded to bf16."""

from __future__ import annotations

import os
import subprocess
import sys

import inputs
import oracle
import pytest
import torch
from backends import CPU, SELECTED
from inputs import activations, long_k, random_weight
from oracle import FORMATS, Value, check, spec

from torch_metalmm import _C

ops = torch.ops.metalmm
pytestmark = pytest.mark.skipif(CPU not in SELECTED, reason="the cpu engine was not asked for")
FASTER = torch.cpu.get_capabilities().get("avx512_bf16", False) and "avx512" in _C.cpu_isa()


def chosen(m: int, dtype: str) -> bool:
    return bool(_C.cpu_strategy(m, dtype) == "dense")


@pytest.mark.filterwarnings("ignore:TF32")  # that oneDNN has none here
def test_chosen_for_bf16_where_the_machine_multiplies_it() -> None:
    """From some number of rows on; f32 and f16 x, and a single row, stay with the kernels here."""
    assert not any(chosen(m, dtype) for m in (1, 64, 4096) for dtype in ("f32", "f16"))
    rows = [m for m in range(1, 600) if chosen(m, "bf16")]
    if not FASTER:
        assert rows == []
        return
    assert 1 < rows[0] < 512 and rows == list(range(rows[0], 600))
    with torch.backends.mkldnn.flags(enabled=False):  # the user says that oneDNN shall not
        assert not chosen(512, "bf16")


@pytest.mark.parametrize("isa", [i for i in _C.cpu_isas() if "avx512" not in i][:1])
def test_not_under_another_instruction_set(isa: str) -> None:
    """METALMM_CPU_ISA=avx2 asks for no AVX-512."""
    code = "import torch, torch_metalmm; print(torch_metalmm._C.cpu_strategy(512, 'bf16'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"METALMM_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "gemm"


@pytest.mark.isa
@pytest.mark.parametrize("name", FORMATS)
def test_w_is_rounded_to_bf16_once(name: str) -> None:
    """One-hot rows of x give W as torch rounds the specification's f32: to nearest, ties even."""
    k = long_k(name)
    packed = random_weight(name, 19, k)
    y = ops.linear(torch.eye(k).bfloat16(), packed, None, name, "dense")
    assert torch.equal(y.T, spec(name, packed, k).bfloat16())


@pytest.mark.isa
def test_nan_and_infinity_stay_what_they_are() -> None:
    """f32 whose upper half alone is an infinity, and numbers that round to one."""
    bits = [0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x7F7F8000, 0x7F7F7FFF]
    w = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)[:, None]
    y = ops.linear(torch.ones(1, 1).bfloat16(), w, None, "f32", "dense")[0]
    want = w[:, 0].bfloat16()
    assert torch.equal(y.isnan(), want.isnan()) and y.isnan().sum() == 3
    assert torch.equal(y[3:], want[3:]) and y[5] == torch.inf


@pytest.mark.parametrize("m", [40, 130])
@pytest.mark.parametrize("name", oracle.KINDS)
def test_the_ops_keep_their_bounds(name: str, m: int) -> None:
    """Of bf16 x, where it is chosen: linear, swiglu and swiglu_linear."""
    k, dtype = inputs.short_k(name), torch.bfloat16
    halved = CPU.halves(None, dtype, name, (m, 21, k))
    assert (halved is dtype) == FASTER
    gate, up = (random_weight(name, 21, k, seed=i) for i in range(2))
    values = [spec(name, w, k) for w in (gate, up)]
    x = activations(m, k, dtype=dtype) / 8
    residual = activations(m, 21, dtype=dtype, seed="r")
    product = Value.of(x).dot(values[0], halved=halved)
    check(ops.linear(x, gate, None, name), product.store(dtype), "linear")
    y = ops.linear(x, gate, None, name, residual=residual)
    check(y, (product + Value.of(residual)).store(dtype), "linear and a residual")
    a, b = (Value.of(x).dot(w, halved=halved) for w in values)
    check(ops.swiglu(x, gate, up, name, name), (a.silu() * b).store(dtype), "swiglu")
    hidden = Value.of(x).silu() * Value.of(x)
    y = ops.swiglu_linear(x, x, gate, None, name)
    check(y, hidden.dot(values[0], halved=halved).store(dtype), "swiglu_linear")

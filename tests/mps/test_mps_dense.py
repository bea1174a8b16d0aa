"""What the Metal engine encodes beside torch's matmul: the panels, and what joins the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorder import buffers_of, passes_of, recorded
from shaders import SLOTS, alignment_of, args_of

from torch_metalmm import _C, formats

ops = torch.ops.metalmm
NAME = "q4_0"


def weight(n: int, k: int) -> torch.Tensor:
    """W [n, k] that begins behind a row of its table."""
    return torch.zeros(n + 1, formats.get(NAME).row_bytes(k), dtype=torch.uint8)[1:]


def kernels(calls: list[Any]) -> list[str]:
    return [call[1] for call in calls if call[0] == "set_pipeline"]


@pytest.mark.parametrize("bias", [True, False])
def test_panels(bias: bool) -> None:
    """As planned: each pass reads the next rows of W and writes the same panel."""
    n, k = 16400, 4096
    x, w, b = torch.zeros(3, k).half(), weight(n, k), torch.zeros(n).half()
    with recorded("m1") as recording:
        y = ops.linear(x, w, b if bias else None, NAME, "dense")
    passes = passes_of(recording)
    assert y.shape == (3, n) and y.is_contiguous()
    sizes = {"m": 3, "n": n, "k": k, "format": NAME, "bias": bias}
    plan = _C.plan(**sizes, chip="m1", strategy="dense", w_alignment=alignment_of(w))
    dense, row = plan["dense"], w.stride(0)
    assert dense["panels"] == 2 and len(passes) == 2 + bias == len(plan["passes"])
    for calls, one in zip(passes, plan["passes"], strict=True):
        assert calls[0] == ("set_pipeline", one["kernel"], list(one["constants"].values()))
        assert ("set_bytes", SLOTS.index("args"), args_of(one)) in calls
        assert calls[-1] == ("dispatch", one["grid"], one["group"])
        assert {*buffers_of(calls), "args"} == {*one["slots"]}
    base, begin = w.untyped_storage().data_ptr(), w.storage_offset()
    panels = [buffers_of(calls)["y"] for calls in passes[:2]]
    for i, (calls, panel) in enumerate(zip(passes[:2], panels, strict=True)):
        rows = min(dense["rows"], n - i * dense["rows"])
        at = begin + i * dense["rows"] * row
        assert buffers_of(calls)["weight"] == [base, at, rows * row]
        assert panel == [panels[0][0], 0, rows * k * 2]
    if bias:
        joined = buffers_of(passes[2])
        assert joined["partial"] == [y.data_ptr(), 0, 0]
        assert joined["bias"] == [b.data_ptr(), 0, 2 * n]
        assert joined["y"] == [y.data_ptr(), 0, 2 * 3 * n]


def test_what_takes_the_choice_of_linear() -> None:
    """On M5: linear, gemm, and the products of norm_linear and swiglu behind their norms."""
    k, n, m = 64, 48, 96
    x, w, g = torch.zeros(m, k).half(), weight(n, k), torch.ones(k).half()
    decode = f"dequantize_{NAME}_f16"
    calls = {
        "linear": lambda: ops.linear(x, w, None, NAME),
        "gemm": lambda: ops.gemm(x, w, NAME, None, 0.5),
        "norm_linear": lambda: ops.norm_linear(x, g, 1e-5, 0.0, w, None, NAME),
        "swiglu": lambda: ops.swiglu(x, w, w, NAME, NAME, "silu", g, 1e-5),
    }
    wanted = {
        "linear": [decode],
        "gemm": [decode, "split_reduce_f16"],
        "norm_linear": ["rms_norm_f16", decode],
        "swiglu": ["rms_norm_f16", decode, decode, "act_mul_f16"],
    }
    for op, call in calls.items():
        for chip in ("m5-max", "m4-max"):
            with recorded(chip) as recording:
                call()
            assert (kernels(recording) == wanted[op]) == (chip == "m5-max"), (
                op,
                kernels(recording),
            )


def test_gate_and_up_that_torch_has_rounded_are_read_as_they_lie() -> None:
    """Of q4_0 on M5; rows of f16 in place of one of them are torch's too, those of M4 f32."""
    k, n, m = 64, 48, 96
    x, packed, halves = torch.zeros(m, k).half(), weight(n, k), torch.zeros(n, k).half()
    for chip, up, name, size in (
        ("m5-max", packed, NAME, 2),
        ("m5-max", halves, "f16", 2),
        ("m4-max", packed, NAME, 4),
    ):
        with recorded(chip) as recording:
            ops.swiglu(x, packed, up, NAME, name)
        *_, last = passes_of(recording)
        plan = _C.plan("act_mul", n=m * n, chip=chip, dtype="f16", rounded=size == 2)
        constants = list(plan["passes"][0]["constants"].values())
        assert last[0] == ("set_pipeline", "act_mul_f16", constants)
        assert [buffers_of(last)[slot][2] for slot in ("x", "x2")] == [size * m * n] * 2


def test_nothing_is_decoded_of_rows_of_the_dtype_of_x() -> None:
    x, w = torch.ones(5, 32).half(), torch.full((7, 40), 2.0).half()[:, 3:35]
    with recorded("m1") as recording:
        y = ops.linear(x, w, None, "f16", "dense")
    assert recording == [] and torch.equal(y, torch.full((5, 7), 64.0).half())


def test_attention_from_so_many_queries_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """METALMM_SDPA_FROM: of a q8_0 cache keys and values are decoded, and nothing else encoded."""
    q, rows = torch.zeros(1, 2, 20, 64).half(), torch.zeros(1, 1, 20, 68, dtype=torch.uint8)

    def taken(queries: int) -> bool:
        with recorded("m4-max") as recording:
            ops.attention(q[:, :, -queries:], rows, rows, "q8_0", "q8_0", None)
        return kernels(recording) == ["dequantize_q8_0_f16"] * 2

    for asked, wanted in (("", (False, False)), ("0", (False, False)), ("17", (False, True))):
        monkeypatch.setenv("METALMM_SDPA_FROM", asked)
        assert (taken(16), taken(17)) == wanted
    monkeypatch.setenv("METALMM_SDPA_FROM", "-1")
    with pytest.raises(ValueError, match="METALMM_SDPA_FROM: '-1' must be a whole number of quer"):
        _C.install_recorder()

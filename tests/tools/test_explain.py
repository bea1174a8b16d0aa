"""`metalmm explain`: plans in words and bytes."""

from __future__ import annotations

import re

import pytest

from torch_metalmm import _C
from torch_metalmm.tools import explain as explaining
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.explain import explain


def test_explain() -> None:
    """A plan in full: what runs, its grid, its bytes, and why."""
    text = explain("1x4096x4096", "q4_k", "m4-max")
    assert "gemv_q4_k_f16" in text and "has 4 for each of 40 cores" in text
    assert "1 x 256 x 1 threadgroups, tiles of M x tiles of N" in text
    assert "k = 4096" in text and "9,437,184" in text
    split = explain("32x1024x4096", "AFFINE4_G64_BF16", "Apple M4 Max", "bfloat16")
    assert "pass 2 of 2: split_reduce_bf16" in split and "scale_type = bf16" in split
    assert "partials" in split and "epilogue = f32 partial results" in split
    forced = explain("8x64x64", "f16", "m1", "f32", "gemm_naive")
    assert "gemm_naive: forced" in forced


def test_explain_a_norm() -> None:
    """In the kernel that multiplies, or as a pass before it."""
    fused = explain("1x4096x4096", "q4_k", "m4-max", norm=True)
    assert "norm fused: " in fused and "pass 1 of 1: gemv_q4_k_f16" in fused
    assert "epilogue = x normalised + weight of the norm" in fused
    apart = explain("8x4096x4096", "q4_k", "m4-max", norm=True)
    assert "rms_norm: a norm on its own" in apart and "pass 2 of 2: gemm_small" in apart
    assert "8 x 1 x 1 threadgroups, one for each row of x" in apart
    assert "2 passes" in apart and "norm" not in explain("8x4096x4096", "q4_k", "m4-max")
    forced = explain("8x4096x4096", "q4_k", "m4-max", strategy="gemv_batched", norm=True)
    assert "norm fused: " in forced


def test_explain_torch_s_matmul() -> None:
    """Panels that are alike are one entry; what W, panel and products move; no time of a GPU that
    the model does not know."""
    text = explain("512x28672x4096", "q4_k", "m5-max")
    assert "passes 1 to 2 of 2: dequantize_q4_k_f16" in text and text.count("buffers") == 1
    assert "then torch's matmul of x[512, 4096] and the 14336 rows" in text
    assert "117,440,512  f16, written and read 2 times" in text and "decoding " in text
    assert "2 passes and torch's matmul" in text
    several = explain("512x28016x4096", "q4_k", "m5-max")
    assert "pass 1 of 2: " in several and "and the 14000 rows" in several
    normed = explain("512x64x4096", "q4_k", "m5", norm=True)
    assert "pass 1 of 2: rms_norm_f16" in normed and "pass 2 of 2: dequantize_q4_k" in normed
    as_it_lies = explain("48x64x4096", "f16", "cuda")
    assert "W is multiplied as it lies" in as_it_lies and "pass 1" not in as_it_lies
    assert "prediction" not in as_it_lies


@pytest.mark.parametrize("shape", ["1x2", "1x2x3x4", "axbxc", "0x4x4", "-1x4x4", "1 x2x3", ""])
def test_explain_shape(shape: str) -> None:
    with pytest.raises(ValueError, match="shape: .* is not MxNxK"):
        explain(shape, "q4_0", "m1")


@pytest.mark.parametrize(
    ("bits", "words"),
    [(_C.EPILOGUE_BITS, explaining.EPILOGUE), (_C.BOUNDS_BITS, explaining.BOUNDS)],
)
def test_explain_names_every_bit(bits: dict[str, int], words: dict[str, str]) -> None:
    assert words.keys() == bits.keys()
    assert [explaining._bits(bit, bits, words) for bit in bits.values()] == list(words.values())
    assert explaining._bits(sum(bits.values()), bits, words) == " + ".join(words.values())


def test_explain_says_which_sizes_have_a_tail() -> None:
    """Tiles of the matrix units are told of one of M always: prompts share a pipeline."""
    tails = {"64x64x128": "M", "63x64x128": "M", "64x63x128": "NM", "64x64x125": "MK"}
    tails["9x97x1061"] = "NMK"
    for shape, sizes in tails.items():
        text = explain(shape, "f32", "m1", "f32", "gemm")
        assert "".join(re.findall(r"\b([NMK]) (?:has|may have) a tail", text)) == sizes


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "1x4096x4096", "--format", "q4_k", "--chip", "m4-max"]
    assert main(["explain", *arguments]) == 0
    assert capsys.readouterr().out.strip() == explain("1x4096x4096", "q4_k", "m4-max")

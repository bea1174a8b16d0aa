"""The chip model: cases by hand, its data and what is printed of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite

import pytest

from bench.__main__ import main
from bench.shaders import chips
from bench.tables import read_block
from torch_metalmm import _C, formats
from torch_metalmm.tools import cost_model
from torch_metalmm.tools.cost_model import (
    LAUNCH_US,
    Chip,
    Prediction,
    cost,
    predict,
)
from torch_metalmm.tools.explain import explain
from torch_metalmm.tools.token_time import MODELS

# 3.5 cycles for one row of x and 1.25 for each further one, so that the cases below stay as they
# are when the decoding loops change.
COUNTS = {
    "batch": 5,
    "gemv": {"q4_0": {"f16": 3.5}, "q8_0": {"f16": 3.5}},
    "gemv_batched": {"q4_0": {"f16": 8.5}, "q8_0": {"f16": 8.5}},
}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cost_model, "counts", lambda: COUNTS)
    yield


def check(p: Prediction, memory: float, issue: float, launch: float, bound: str) -> None:
    assert (p.memory, p.issue, p.launch) == pytest.approx((memory, issue, launch), rel=1e-12)
    assert p.total == max(p.memory, p.issue) + p.launch and p.bound == bound


@pytest.mark.usefixtures("by_hand")
def test_memory_bound_by_hand() -> None:
    """gemv_wide_n on 32 cores of 128 lanes at 1296 MHz and 400 GB/s: 8016 threadgroups of 16 rows.

    128256 rows of 128 blocks of 18 bytes, x, y: 295,501,824 + 8192 + 256,512 bytes.
    """
    p = predict(1, 128256, 4096, "q4_0", "m1-max")
    issue = 251 * 16 * 4096 * 3.5 / (128 * 1296)
    check(p, 295_766_528 / (400e3 * 0.9), issue, 2.0, "memory")
    assert 823 < p.total < 824 and p.moved_bytes == 295_766_528


@pytest.mark.usefixtures("by_hand")
def test_issue_bound_by_hand() -> None:
    """gemm, M = 32, on 8 cores at 1278 MHz and 68 GB/s: 64 tiles of 64 rows, 8 a core.

    A weight takes 3.5 - 1 cycles to decode and 32 in the matrix unit.
    """
    p = predict(32, 4096, 4096, "q4_0", "m1", strategy="gemm")
    moved = 4096 * 2304 + 2 * 32 * 4096 * 2
    check(p, moved / (68e3 * 0.9), 8 * 64 * 4096 * 34.5 / (128 * 1278), 2.0, "issue")
    assert 444 < p.total < 445


@pytest.mark.usefixtures("by_hand")
def test_launch_bound_by_hand() -> None:
    """gemv of 4 threadgroups of 16 rows: one turn of 40 cores."""
    p = predict(1, 64, 64, "q4_0", "m4-max")
    moved = 64 * 36 + 2 * 64 + 2 * 64
    check(p, moved / (546e3 * 0.9), 16 * 64 * 3.5 / (128 * 1578), 2.0, "launch")


@pytest.mark.usefixtures("by_hand")
def test_further_rows_and_split_k_by_hand() -> None:
    """gemv_batched decodes once for 2 passes of 5 rows; split-K has a second pass and its bytes."""
    p = predict(9, 160, 8192, "q8_0", "m1", strategy="gemv_batched")
    assert p.cycles == 3.5 + 4 * 1.25
    assert p.issue == pytest.approx(3 * 16 * 8192 * 8.5 / (128 * 1278), rel=1e-12)
    plan = _C.plan(m=16, n=64, k=8192, format="q4_0", chip="m1", strategy="gemm")
    parts = plan["passes"][0]["grid"][2]
    p = cost(plan, Chip.named("m1"))
    assert parts > 1 and p.launch == 2 * LAUNCH_US
    assert p.moved_bytes == 64 * 4608 + 16 * (8192 + 64) * 2 + 2 * parts * 16 * 64 * 4


CHIPS = [Chip.named(name) for name in chips.CHIPS]
FORMATS = formats.names()


def test_every_chip_and_format_has_a_prediction() -> None:
    for chip in CHIPS:
        for format in FORMATS:
            for m, dtype in ((1, "f16"), (8, "bf16"), (33, "f32")):
                p = predict(m, 4096, 4096, format, chip, dtype)
                assert isfinite(p.total) and min(p.memory, p.issue, p.launch) > 0
            # No faster than the weights at nominal bandwidth.
            weights = 4096 * formats.get(format).row_bytes(4096)
            assert p.total > weights / chip.bandwidth_gb_s / 1e3


@pytest.mark.parametrize(
    ("model", "parameters", "not_in_products"),
    [
        ("Llama 2 7B", 6_738_415_616, 32000 * 4096 + 65 * 4096),
        ("Mistral 7B", 7_241_732_096, 32000 * 4096 + 65 * 4096),
        ("Qwen3 4B", 4_022_468_096, 73 * 2560 + 72 * 128),
    ],
)
def test_models_have_their_parameters(model: str, parameters: int, not_in_products: int) -> None:
    """All but norms and, where it is not the output head, the embedding: one row a token."""
    products = sum(n * k * times for n, k, times in MODELS[model].products(fused=False))
    assert products == parameters - not_in_products


def test_what_is_unknown_is_an_error() -> None:
    with pytest.raises(ValueError, match="chip: unknown 'm4-mega'; allowed: m1, "):
        predict(1, 64, 64, "q4_0", "m4-mega")
    with pytest.raises(ValueError, match="format: unknown 'q9'; allowed: "):
        predict(1, 64, 64, "q9", "m1")
    with pytest.raises(ValueError, match="m, n: 0, 64; must be at least 1"):
        predict(0, 64, 64, "q4_0", "m1")
    with pytest.raises(ValueError, match="k: 65 is not a multiple"):
        predict(1, 64, 65, "q4_0", "m1")


# ---- what it is made of, what is printed


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """First; the table of several rows after it."""
    assert main(["chips"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        read_block(chips.PAGE, "chips") + "\n\n**Predicted time of 2 / 4 / 8 rows"
    )


def test_the_page_names_a_source_for_every_chip() -> None:
    sources = chips.PAGE.read_text().partition("## The chips")[2]
    named = ", ".join(re.findall(r"^\| ([^|]+) \| .+ \|$", sources, re.M)).split(", ")
    assert set(chips.CHIPS) <= set(named)


def test_the_table_of_chips() -> None:
    """M1 to M5, in every class that exists."""
    classes = {f"m{i}{c}" for i in range(1, 6) for c in ("", "-pro", "-max", "-ultra")}
    assert set(chips.CHIPS) == classes - {"m4-ultra"}


def test_explain_shows_the_prediction_and_says_so() -> None:
    text = explain("1x4096x4096", "q4_k", "Apple M4 Max")
    p = predict(1, 4096, 4096, "q4_k", "m4-max")
    assert "prediction (" in text and "nothing was measured" in text
    assert f"{p.total:.1f} us  {p.bound} bound" in text and f"{p.memory:.1f} us" in text

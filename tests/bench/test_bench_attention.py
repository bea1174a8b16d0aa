"""`python -m bench attention`: what is checked, what is timed, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import measured_once, records_of

from bench import attention, runner
from bench.attention import Data, Heads, Rounds, Shape, Variant, shapes
from bench.devices import CPU
from bench.options import parse
from bench.peers import ggml, sdpa
from bench.peers.ggml import causal_mask
from bench.problem import Setting
from bench.report import cell_tables
from bench.runner import FEW, SLOW, Run, Way, slow_ones

pytestmark = pytest.mark.usefixtures("own_threads")

HEADS = Heads(8, 2, 64)
ON_CPU = Setting(threads=1, cold_bytes=1)


@pytest.fixture(autouse=True)
def the_backend_that_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice is one of the process: a test that leaves it would take it from every other."""
    monkeypatch.setattr(runner, "of_cpu", measured_once)
    yield
    sdpa.chosen.take("")


def test_every_cell_is_checked_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding and prefills; ours in each format, torch's in each dtype; ratios of one run."""
    records = records_of(tmp_path, "attention", "--formats", "f16,q8_0", "--pages")
    found = [r for r in records if r["kind"] == "attention"]
    wanted = [(1, 1, 70), (1, 1, 300), (2, 1, 70), (2, 1, 300), (1, 24, 24), (1, 24, 124)]
    assert list(dict.fromkeys((r["batch"], r["queries"], r["slots"]) for r in found)) == wanted
    assert all(r["ok"] and r["us"] > 0 and r["percent_read"] > 0 for r in found)
    ours = [r for r in found if r["is_ours"]]
    names = [f"metalmm{pages} {f}" for pages in ("", " in pages") for f in ("f16", "q8_0")]
    assert [r["variant"] for r in ours] == names * len(wanted)
    assert all(r["of_f16"] > 0 and r["of_best_q3"] > 0 for r in ours)
    assert all(r["of_rows"] > 0 for r in ours if "in pages" in r["variant"])
    assert ours[0]["of_f16"] == 1 and ours[0]["bytes"] == 2 * 2 * 70 * 64 * 2
    torchs = {r["variant"] for r in found if not r["is_ours"]}
    assert {f"SDPA flash, {form} bf16" for form in ("grouped", "folded", "causal")} < torchs
    printed = capsys.readouterr().out
    assert "Attention of 8/2 heads of 64, one query" in printed and "24 queries" in printed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_wrong_result_is_found(dtype: torch.dtype, queries: int) -> None:
    """A scale that is off by a tenth, a slot that is left out, values of another head."""
    data = Data(Shape(HEADS, 2, queries, 90), Setting(1, 1, dtype))
    right = data.ours("q8_0")
    assert data.verdict(right)["worst"] <= 1
    q, (k, v) = data.q.to(dtype), data.caches("q8_0")[0]
    op, length = torch.ops.metalmm.attention, data.length

    def worst(*args: Any, **options: Any) -> float:
        changed = replace(right, call=lambda i: op(*args, **options))
        return float(data.verdict(changed)["worst"])

    assert worst(q, k, v, "q8_0", "q8_0", length) <= 1
    assert worst(q, k, v, "q8_0", "q8_0", length, scale=1.1 * 64**-0.5) > 1
    assert worst(q, k, v, "q8_0", "q8_0", length - 1) > 1
    assert worst(q, k, v.flip(1), "q8_0", "q8_0", length) > 1


def test_nan_is_wrong() -> None:
    data = Data(Shape(HEADS, 1, 1, 40), ON_CPU)
    shape = (1, HEADS.heads, 1, HEADS.size)
    right = data.ours("f32")
    wrong = Variant("", "f32", lambda i: torch.full(shape, torch.nan), False, Rounds())
    assert data.verdict(right)["worst"] <= 1 < data.verdict(wrong)["worst"]


def test_what_a_device_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that raises, and copies of keys that would be too large."""
    data = Data(Shape(HEADS, 1, 1, 40), ON_CPU)
    monkeypatch.setattr(sdpa, "backends", lambda q, slots, form: ["flash", "efficient"])
    refused: dict[str, str] = {}
    found = [*data.peers(torch.float32, False, refused)]
    assert [*refused] == ["SDPA efficient, grouped f32", "SDPA efficient, folded f32"]
    assert [v.name for v in found] == ["SDPA flash, grouped f32", "SDPA flash, folded f32"]
    monkeypatch.undo()
    assert [*sdpa.backends(data.q, 40, "grouped")] == ["math", "flash"]
    monkeypatch.setattr(sdpa, "MATH_BYTES", 1)
    assert [*sdpa.backends(data.q, 40, "grouped")] == ["flash"]


def test_slow_variants_have_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that was interrupted in its first call."""
    seconds = iter([1.0, SLOW + 1, SLOW + 9, 2.0, SLOW + 2, SLOW + 3, SLOW + 1, SLOW])
    monkeypatch.setattr(runner, "wall_clock", lambda call: next(seconds))
    found = slow_ones({n: Way(n, lambda i: None) for n in "abcd"})
    assert [*found] == ["b"] and (found["b"].median, found["b"].count) == (SLOW + 2, FEW)


def test_the_mask_of_ggml() -> None:
    """Rows up to a multiple of 64, those behind the queries as if there were more of them."""
    mask = causal_mask(2, 5)
    assert mask.shape == (64, 5) and mask.dtype == torch.float16
    assert mask[:3].isneginf().int().tolist() == [[0, 0, 0, 0, 1], [0] * 5, [0] * 5]


@pytest.mark.skipif(ggml.missing(CPU) is not None, reason="llama-cpp-python")
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("format", ["f32", "f16", "q8_0"])
def test_ggml_reads_our_caches(format: str, queries: int) -> None:
    data = Data(Shape(HEADS, 2, queries, 90), Setting(threads=1, cold_bytes=1 << 20))
    variant = data.of_ggml(format)
    assert len(data.caches(format)) > 1 and data.verdict(variant)["worst"] <= 1


def test_operations_of_a_cell() -> None:
    """A query sees the filled slots, those before it in the prefill, and its own."""
    decode, prefill = Shape(HEADS, 3, 1, 100), Shape(HEADS, 1, 4, 10)
    assert decode.flops == 4 * 3 * 8 * 64 * 100
    assert prefill.flops == 4 * 8 * 64 * (7 + 8 + 9 + 10)
    assert decode.cache_bytes("q8_0") == 2 * 3 * 2 * 100 * 68
    wanted = shapes(HEADS, (2, 8), (100, 200), 16, (0, 50))
    assert [(c.batch, c.queries, c.slots) for c in wanted][3:] == [
        (8, 1, 200),
        (2, 16, 16),
        (2, 16, 66),
    ]
    assert len(shapes(HEADS, (1,), (100,), 0, (0, 50))) == 1


def test_a_strategy_is_that_of_the_op() -> None:
    """Passed on, and named in the rows."""
    options = ["attention", "--quick", "--threads", "1", "--batch", "1", "--context", "70"]
    with pytest.raises(ValueError, match="strategy"):
        [*attention.run(Run(parse([*options, "--strategy", "no such"])))]
    args = parse([*options, "--strategy", "attention_tile", "--prefill", "0"])
    ours = [r["variant"] for r in attention.run(Run(args)) if r.get("is_ours")]
    assert ours == ["metalmm attention_tile f32", "metalmm attention_tile q8_0"]


def test_too_large_a_cache_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.attention.MOST_BYTES", {"cpu": 1})
    found = [*attention.run(Run(parse(["attention", "--quick", "--threads", "1"])))][1:]
    assert {r["kind"] for r in found} == {"skipped"} and found[0]["what"] == "batch 1, 1 of 70"


def test_a_wrong_variant_has_a_row_without_times() -> None:
    record = {"kind": "attention", "variant": "a", "batch": 1, "queries": 1, "slots": 8}
    record |= {"title": "t", "bytes": 1e6, "worst": 3.0, "ok": False}
    other = record | {"variant": "b", "ok": True, "us": 2.0, "us_q1": 1.0, "us_q3": 3.0}
    (table,) = cell_tables([record, other])
    assert table.rows[0] == ["a", "1", "8", "1.00", "WRONG", "–", "300 %"]

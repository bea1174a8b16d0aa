"""The benchmark's command line: it checks before it times, and draws what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from measured import records_of
from places import ROOT

from bench import matmul
from bench.__main__ import main
from bench.devices import Device
from bench.models import quality
from bench.options import parse
from bench.peers.products import ENGINES
from bench.problem import NAMED, Checker, Problem, Setting, Variant
from bench.runner import Run
from torch_metalmm import _C


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON lines of one quick run of the matrix, by a process of its own."""
    out = tmp_path_factory.mktemp("bench") / "out.jsonl"
    asked = "matmul --quick --repetitions 1 --engines metalmm,linear_f32 --json"
    command = [sys.executable, "-m", "bench", *asked.split(), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_cell_of_a_run_is_checked_and_timed(quick: Path) -> None:
    cells = [r for r in map(json.loads, quick.read_text().splitlines()) if r["kind"] == "matmul"]
    own = [f"metalmm {name}{how}" for name in ("q4_0", "q4_k") for how in ("", " int8", " int16")]
    assert {(c["variant"], c["m"]) for c in cells} == {
        (v, m) for v in (*own, "F.linear f32") for m in (1, 8, 64)
    }
    for cell in cells:
        assert cell["ok"] and cell["us"] > 0 and cell["percent_read"] > 0


def test_a_plot_is_drawn_from_the_records(quick: Path, tmp_path: Path) -> None:
    written = tmp_path / "cpu.png"
    assert main(["plot", str(quick), "--output", str(written)]) == 0
    assert written.read_bytes().startswith(b"\x89PNG")


def test_the_strategy_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of the device's own numbers; on the CPU the engine says."""
    problem = {"n": 2048, "k": 4096, "format": "q4_0", "dtype": "f16"}
    assert Device("cpu").strategy(**problem) == "gemv_steps"
    assert Device("cpu").strategy(**problem, m=512) == "gemm"
    assert Device("cpu").strategy(**problem, m=512, strategy="dense") == "dense"
    for cores, wanted in ((132, "gemv_large_k"), (8, "gemv")):
        found = SimpleNamespace(multi_processor_count=cores)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda found=found: found)
        assert Device("cuda").strategy(**problem) == wanted
        assert Device("cuda").strategy(**problem, m=512) == "dense"
    tile = {"m": 128, "n": 4096, "k": 4096, "format": "q4_k", "dtype": "f32"}
    for memory, wanted in ((0, "gemm"), (32768, "gemm"), (8192, "gemm_small")):
        facts = {"plans_for": "m1", "cores": 8, "max_threadgroup_memory": memory, "max_threads": 0}
        monkeypatch.setattr(_C, "mps_facts", lambda facts=facts: facts, raising=False)
        assert Device("mps").strategy(**tile) == wanted


def test_a_run_names_the_absent_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ENGINES["ggml"]._replace(missing=lambda device: "not here")
    monkeypatch.setitem(ENGINES, "ggml", absent)
    records = matmul.run(Run(parse(["--quick", "--engines", "auto"])))
    skipped = {"kind": "skipped", "what": "ggml", "why": "not here"}
    assert any(r == skipped for r in records)  # and no further record is made


def test_what_is_not_plotted(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of two machines, and of none that was timed."""
    first, *rest = quick.read_text().splitlines()
    other, empty = tmp_path / "other.jsonl", tmp_path / "empty.jsonl"
    other.write_text("\n".join([json.dumps(json.loads(first) | {"machine": "another"}), *rest]))
    empty.write_text('{"kind": "run"}\n')
    for files, why in (([quick, other], "several machines: "), ([empty], "nothing to plot")):
        assert main(["plot", *map(str, files), "--output", str(tmp_path / "no.png")]) == 2
        assert why in capsys.readouterr().err


def test_one_wrong_code_in_a_million_is_found() -> None:
    problem = Problem(NAMED["tiny"], Setting(threads=1, cold_bytes=1))
    w = problem.w
    spoiled = w.clone()
    spoiled[511, 7] += 2.0**-6  # problem.rows has the last row
    for weight, ok in ((w, True), (spoiled, False)):

        def call(_: int, weight: torch.Tensor = weight) -> torch.Tensor:
            return problem.x(2) @ weight.t()

        variant = Variant("t", "t", w.nbytes, 1, lambda x: call, lambda: w[problem.rows].double())
        assert Checker(problem)(variant, problem.x(2), call)["ok"] is ok


def test_several_rows_beside_one(tmp_path: Path) -> None:
    """Each number of rows as fast as may be, and with the bits of single ones."""
    given = ("--shapes", "tiny", "--formats", "q6_k", "--m", "5")
    found = records_of(tmp_path, "matmul", "--exact", *given)
    cells = {(r["variant"], r["m"]): r for r in found if r["kind"] == "exact"}
    names = [f"metalmm q6_k{how}" for how in ("", " int8", " int16")]
    assert {*cells} == {
        *((n, m) for n in names for m in (1, 5)),
        *((f"{n}, exact", 5) for n in names),
    }
    assert all(r["ok"] and r["of_one"] > 0 for r in cells.values())


def test_quality_of_the_real_models(own_threads: None, tmp_path: Path) -> None:
    records = records_of(tmp_path, "quality", "--formats", "q8_0")
    rows = [r for r in records if r["kind"] == "quality"]
    smollm2, packed, minilm, packed_minilm = rows
    assert smollm2["divergence"] == 0 and minilm["worst_cosine"] > 1 - 1e-12
    assert 0 < packed["divergence"] < 0.01 and packed["same_top"] > 0.9
    assert 0.999 < packed_minilm["worst_cosine"] < packed_minilm["cosine"] < 1
    for row in (packed, packed_minilm):
        assert row["formats"] == {"q8_0": 1.0} and row["bytes"] < row["f16_bytes"] * 0.54


def test_quality_with_an_importance_matrix(own_threads: None) -> None:
    """Formats that search lose less with it; others are left out."""
    found = []
    for is_weighed in (False, True):
        args = SimpleNamespace(quick=True, activations=(), imatrix=is_weighed)
        with torch.inference_mode():
            found.append([*quality.language_model(["q8_0", "q4_0"], args)])
    plain, weighed = found
    assert [r["variant"] for r in weighed] == ["the file's q4_1", "q4_0, imatrix"]
    assert weighed[0]["divergence"] == 0 < weighed[1]["divergence"] < plain[2]["divergence"]
    assert weighed[1]["formats"] == {"q4_0": 1.0}

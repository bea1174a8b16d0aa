"""The benchmark's command line: it checks before it times, and draws what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.problem import Checker, Problem, Setting, Variant
from bench.shapes import NAMED

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON lines of one quick run of the matrix."""
    out = tmp_path_factory.mktemp("bench") / "out.jsonl"
    done = bench("matmul", "--quick", "--engines", "metalmm,linear_f32", "--json", str(out))
    assert done.returncode == 0, done.stderr
    return out


def test_every_cell_of_a_run_is_checked_and_timed(quick: Path) -> None:
    cells = [r for r in map(json.loads, quick.read_text().splitlines()) if r["kind"] == "matmul"]
    assert {(c["variant"], c["m"]) for c in cells} == {
        (v, m) for v in ("metalmm q4_0", "metalmm q4_k", "F.linear f32") for m in (1, 8, 64)
    }
    for cell in cells:
        assert cell["ok"] and cell["us"] > 0 and cell["percent_read"] > 0


def test_plots_are_drawn_from_the_records(quick: Path, tmp_path: Path) -> None:
    done = bench("plot", str(quick), "--output", str(tmp_path), "--prefix", "cpu-")
    assert done.returncode == 0, done.stderr
    for name in ("roofline", "bandwidth", "time"):
        assert (tmp_path / f"cpu-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_time_against_m_of_several_variants(quick: Path, tmp_path: Path) -> None:
    """A row per M, a column per variant; the records plot alone and with those of another run."""
    out = tmp_path / "sweep.jsonl"
    engines = ("--engines", "metalmm,linear_f32", "--formats", "q4_0,f16", "--m", "1-3,8")
    done = bench("--sweep-m", "--quick", *engines, "--markdown", "--json", str(out))
    assert done.returncode == 0, done.stderr
    cells = [json.loads(line) for line in out.read_text().splitlines()][1:]
    variants = ("metalmm q4_0", "metalmm f16", "F.linear f32")
    assert [(c["variant"], c["m"]) for c in cells] == [
        (v, m) for v in variants for m in (1, 2, 3, 8)
    ]
    assert f"| W 512×1024, µs at M | {' | '.join(variants)} |" in done.stdout
    for files, plots in (([out], ["time"]), ([quick, out], ["roofline", "bandwidth", "time"])):
        folder = tmp_path / str(len(files))
        done = bench("plot", *map(str, files), "--output", str(folder))
        assert done.returncode == 0, done.stderr
        assert sorted(p.stem for p in folder.iterdir()) == sorted(plots)


def test_machines_are_not_plotted_together(quick: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    first, *rest = quick.read_text().splitlines()
    other.write_text("\n".join([json.dumps(json.loads(first) | {"machine": "another"}), *rest]))
    done = bench("plot", str(quick), str(other), "--output", str(tmp_path))
    assert done.returncode == 2 and "several machines: " in done.stderr


def test_a_file_without_times_cannot_be_plotted(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"kind": "run"}\n')
    done = bench("plot", str(tmp_path / "empty.jsonl"), "--output", str(tmp_path))
    assert done.returncode == 2 and "nothing to plot" in done.stderr


def test_one_wrong_code_in_a_million_is_found() -> None:
    problem = Problem(NAMED["tiny"], Setting(threads=1, cold_bytes=1))
    w = problem.w
    spoiled = w.clone()
    spoiled[511, 7] += 2.0**-6  # problem.rows has the last row
    for weight, ok in ((w, True), (spoiled, False)):

        def call(_: int, weight: torch.Tensor = weight) -> torch.Tensor:
            return problem.x(2) @ weight.t()

        variant = Variant("t", "t", w.nbytes, 1, lambda x: call, lambda: w[problem.rows].double())
        assert Checker(problem)(variant, problem.x(2), call).ok is ok


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [
        ("add", "1000"),
        ("dot", "1000"),
        ("gemv", "64 256"),
        ("gemm-naive", "3 64 256"),
        ("dequantize", "64 256"),
        ("embedding", "300 400 256"),
        ("swiglu", "2 64 256"),
    ],
)
def test_a_single_operation_is_checked_and_timed(operation: str, sizes: str) -> None:
    done = bench("matrix-ops", operation, *sizes.split(), "--quick")
    assert done.returncode == 0, done.stderr
    for word in ("first", "checksum", "check     ok", "µs", "σ", "GB/s", "GFLOP/s", "% of the"):
        assert word in done.stdout, word


def test_sizes_that_do_not_fit_are_refused() -> None:
    done = bench("matrix-ops", "gemm", "4", "8", "--quick")
    assert done.returncode == 2 and "takes M N K" in done.stderr


def test_quality_of_the_real_models(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = bench("quality", "--quick", "--formats", "q8_0", "--threads", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = [r for r in map(json.loads, out.read_text().splitlines()) if r["kind"] == "quality"]
    smollm2, packed, minilm, packed_minilm = rows
    assert smollm2["divergence"] == 0 and minilm["worst_cosine"] > 1 - 1e-12
    assert 0 < packed["divergence"] < 0.01 and packed["same_top"] > 0.9
    assert 0.999 < packed_minilm["worst_cosine"] < packed_minilm["cosine"] < 1
    for row in (packed, packed_minilm):
        assert row["formats"] == {"q8_0": 1.0} and row["bytes"] < row["f16_bytes"] * 0.54

"""Pipelines, the choice of libraries and the count of passes, in C++ on a scripted device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from places import COMPILER, ROOT, TESTS

from torch_metalmm import _C

SOURCES = [f"plan/{name}" for name in ("names", "passes", "format", "gpu", "matmul/experts")]
SOURCES += [f"mps/{name}" for name in ("source", "facts", "decisions/commits")]
Run = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(scenario): the lines that tests/mps/mps_pipelines.cpp prints."""
    folder = tmp_path_factory.mktemp("pipelines")
    flatten = [sys.executable, str(ROOT / "csrc/mps/flatten.py"), str(ROOT / "metal")]
    subprocess.run([*flatten, str(folder / "shaders.cpp")], check=True)
    files = [TESTS / "mps/mps_pipelines.cpp", folder / "shaders.cpp"]
    files += [ROOT / "csrc" / f"{name}.cpp" for name in SOURCES]
    program = folder / "pipelines"
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", f"-I{ROOT}"]
    command = [*COMPILER, *options, "-pthread", *map(str, files), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def run(scenario: str) -> list[str]:
        command = [str(program), scenario]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()

    return run


def counts(line: str) -> dict[str, int]:
    words = line.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def test_one_pipeline_for_each_kernel_and_set_of_constants(run: Run) -> None:
    """Every function constant is part of the key; what is set at a dispatch is not."""
    *lines, total = run("keys")
    assert lines == ["same 1", *["same 0"] * 6, "made gemm_q4_0_f16 64"]
    # One library for each kernel, whatever the constants.
    assert counts(total) == {"archives": 1, "compilations": 2, "functions": 8, "pipelines": 8}


def test_threads_that_want_the_same_wait_for_one_compilation(run: Run) -> None:
    assert run("threads") == ["archives 1 compilations 1 functions 3 pipelines 3"]


def test_a_compilation_holds_up_nobody_else(run: Run) -> None:
    lines = run("overlap")
    assert lines[:2] == ["made gemm_q4_0_f16 64", "made gemv_q4_0_f16 64"]


def test_the_source_is_that_of_the_kernel(run: Run) -> None:
    _, _, *text = run("source")
    assert text == _C.metal_source("gemv_q4_0_f16").splitlines()


def test_the_archive_is_preferred(run: Run) -> None:
    """An archive is loaded once, without compiling; one that lacks the pipeline is passed by."""
    *made, total = run("archive")
    assert made == ["made gemv_q4_0_f16 64", "made gemm_q4_0_f16 64"]
    assert counts(total) == {"archives": 1, "compilations": 0, "functions": 2, "pipelines": 2}
    made_from_source, total = run("old_archive")
    assert made_from_source == "made gemv_q4_0_f16 64"
    assert counts(total) == {"archives": 1, "compilations": 1, "functions": 2, "pipelines": 1}


def test_the_compiler_is_heard(run: Run) -> None:
    """The error carries its log; the next call tries again."""
    error, log, made, _ = run("log")
    assert error == "error metalmm: Metal cannot compile gemv_q4_0_f16:"
    assert log == "metal/a.h:3:1: error: no"
    assert made == "made gemv_q4_0_f16 64"


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("no_function", "no pipeline for gemv_q4_0_f16: no function of the name in source"),
        ("no_pipeline", "no pipeline for gemv_q4_0_f16: too many registers"),
        ("max_threads", "needs 128 threads a threadgroup; compiled for this GPU it can have 96"),
        ("simd_width", "is written for simdgroups of 32 threads; this GPU's have 16"),
        ("no_kernel", "kernel: no strategy, format and dtype make 'gemv_q4_0'"),
    ],
)
def test_errors_name_the_kernel_and_the_reason(run: Run, scenario: str, message: str) -> None:
    error = run(scenario)[0]
    assert error.startswith("error ") and error.endswith(message) and "gemv_q4_0" in error


def test_each_stream_is_committed_after_its_own_passes(run: Run) -> None:
    """Every three passes; a plan of more is one commit. Threads lose no pass."""
    *turns, never, threads = run("commits")
    due = [line[:3] for line in turns if line.endswith(" 1")]
    assert due == ["b 1", "a 1", "a 7", "a 1"] and len(turns) == 9
    assert never == "never 0"
    assert threads == "own 4000 common 4000"


def test_weights_are_kept_while_they_live_and_are_used(run: Run) -> None:
    """Taken in at the first beat, asked for at every one; a heap goes with the last of its weights,
    residency three minutes after the last use, the weights' places with the weights."""
    assert run("residency") == [
        "nothing:",
        "used: add heap add buffer commit request",
        "again: request",
        "one of a heap is gone: commit request",
        "another has its memory: request",
        "of no use: end",
        "still:",
        "in use: request",
        "gone: remove heap remove buffer commit end",
        "and stays so:",
    ]


def test_machines_that_are_supported(run: Run) -> None:
    """From M1 and macOS 14 on, a newer chip than the table's and a virtual machine's included."""
    m4, m2, m9, amd, a13, ventura, *virtual = run("facts")
    assert virtual == ["gpu paravirtual-device 7 8 32768 1024"] * 2
    assert m4 == "gpu m4-max 9 32 32768 1024"  # what the device reports: 32 cores, not 40
    assert m2 == "gpu m2 8 10 32768 1024"  # what it does not report: the table's
    assert m9 == "gpu m9-pro 13 24 65536 2048"
    for line, has in ((amd, "AMD Radeon Pro 5500M"), (a13, "Apple A13")):
        assert f"needs an Apple GPU, M1 or newer; this Mac has {has}; use device" in line
    assert "needs macOS 14 or newer, for Metal 3.1; this is macOS 13; use device" in ventura

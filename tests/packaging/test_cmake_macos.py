"""The parts of the build that only a Mac has, with CMake told that this is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from macos_build import configure
from places import ROOT

from bench.shaders.passes import chosen, split
from torch_metalmm import _C

sys.path.insert(0, str(ROOT / "cmake"))
import metallib  # noqa: E402

PROBES = {f"elementwise_{op}" for op in ("add", "sub", "mul", "div")}  # in elementwise.metal
SHADERS = {f.name for f in metallib.shaders()}
# A Metal compiler: "compiles" a shader to its name, "links" names to a list, rejects what REJECT
# names, and warns.
COMPILER = """
import os, sys
words = sys.argv[1:]
out = words[words.index("-o") + 1]
rejected = os.environ["REJECT"].split()
if "-c" in words:
    name = os.path.basename(words[words.index("-c") + 1])
    assert {"-std=metal3.1", "-fno-fast-math", "-ffp-contract=off"} <= set(words)
    if name in rejected:
        sys.exit(name + ":7:1: error: no derived classes")
    if "-Werror" in words and "warning" in rejected:
        sys.exit("warning is an error")
    text = name
else:
    if "link" in rejected:
        sys.exit("cannot link")
    text = "\\n".join(open(w).read() for w in words if w.endswith(".air"))
open(out, "w").write(text)
"""
Done = subprocess.CompletedProcess[str]


def build(folder: Path, reject: str) -> Done:
    command = [str(Path(sys.executable).parent / "cmake"), "--build", str(folder / "build")]
    environment = os.environ | {"REJECT": reject}
    return subprocess.run(
        [*command, "--target", "metallib"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a user's build is configured."""
    return configured(tmp_path_factory.mktemp("mac"))


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of CI's build."""
    return configured(tmp_path_factory.mktemp("strict"), "-DMETAL_STRICT=ON")


def configured(folder: Path, *options: str) -> Path:
    (folder / "metal.py").write_text(COMPILER)
    # Neither the environment nor site-packages: it starts for every shader.
    compiler = f"-DMETAL_COMPILER={sys.executable};-I;-S;{folder / 'metal.py'}"
    done = configure(folder, compiler, *options)
    assert done.returncode == 0, done.stderr
    return folder


def library(folder: Path) -> set[str] | None:
    """The shaders in the library, if there is one."""
    file = folder / "out" / "metalmm.metallib"
    return set(file.read_text().splitlines()) if file.exists() else None


def test_only_what_plan_never_chooses_is_left_out() -> None:
    strategies = {split(kernel)[0] for kernel in chosen()}
    left_out = {f.stem for f in metallib.LIBRARY.rglob("*.metal") if f.name not in SHADERS}
    assert left_out == metallib.LEFT_OUT
    assert not strategies & {*metallib.LEFT_OUT, *PROBES}
    assert {s for s in _C.strategies("linear") if f"{s}.metal" in SHADERS} <= strategies


def test_a_shader_that_is_rejected_does_not_fail_the_build(mac: Path) -> None:
    """The shader is left out of the library, and reported with the compiler's words."""
    done = build(mac, "gemv.metal")
    assert done.returncode == 0, done.stdout + done.stderr
    assert library(mac) == SHADERS - {"gemv.metal"}
    said = done.stdout + done.stderr
    assert "rejects gemv.metal" in said and "gemv.metal:7:1: error: no derived classes" in said
    assert "left out: gemv.metal; kernels are compiled at their first use" in said


@pytest.mark.parametrize("reject", [" ".join(sorted(SHADERS)), "link"])
def test_nothing_that_compiles(mac: Path, reject: str) -> None:
    """No library, not even that of an earlier build; the next build tries again."""
    (mac / "build" / ".ninja_log").unlink(missing_ok=True)  # so that ninja runs it
    (mac / "out" / "metalmm.metallib").write_text("of before")
    done = build(mac, reject)
    assert done.returncode == 0, done.stdout + done.stderr
    assert library(mac) is None
    assert build(mac, "").returncode == 0 and library(mac) == SHADERS


@pytest.mark.parametrize("reject", ["gemv.metal", "warning", "link"])
def test_ci_asks_for_every_shader(strict: Path, reject: str) -> None:
    (strict / "build" / ".ninja_log").unlink(missing_ok=True)  # so that ninja runs it
    done = build(strict, reject)
    assert done.returncode != 0 and library(strict) is None
    assert "error: Apple's compiler rejects" in done.stdout + done.stderr


def test_a_build_without_the_compiler_leaves_no_library_of_before(strict: Path) -> None:
    """An earlier library would be taken for the kernels of the module beside it."""
    assert build(strict, "").returncode == 0 and library(strict) == SHADERS
    assert configure(strict, "-DMETAL_COMPILER=").returncode == 0
    assert library(strict) is None


@pytest.mark.parametrize("apple", [True, False])
def test_openmp_is_not_looked_for_on_a_mac(apple: bool, tmp_path: Path) -> None:
    """Two libomps in a process, torch's and Homebrew's, abort."""
    (tmp_path / "FindOpenMP.cmake").write_text('message(FATAL_ERROR "OpenMP was looked for")\n')
    done = configure(tmp_path, f"-DCMAKE_MODULE_PATH={tmp_path}", "-DMETAL_COMPILER=", apple=apple)
    assert ("OpenMP was looked for" in done.stderr) == (not apple)
    assert (done.returncode == 0) == apple

"""The tests marked `isa` under every instruction set of this machine, not only under the best."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from backends import CPU, SELECTED
from places import ROOT, TESTS

from torch_metalmm import _C

MARK = "pytest.mark." + "isa"
# Collecting the other files takes longer than the tests.
MARKED = sorted(str(file) for file in TESTS.rglob("test_*.py") if MARK in file.read_text())
OTHERS = [isa for isa in _C.cpu_isas() if isa != _C.cpu_isa()]

pytestmark = pytest.mark.skipif(CPU not in SELECTED, reason="the cpu engine was not asked for")


def python(isa: str, *args: str, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, the instruction set forced."""
    path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path)
    env = os.environ | {"METALMM_CPU_ISA": isa, "METALMM_TEST_BACKENDS": "cpu", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


@pytest.mark.parametrize("isa", OTHERS)
def test_every_instruction_set(isa: str) -> None:
    """Exact results are exact, and bounded ones bounded, whichever instructions compute them."""
    args = ["-m", "pytest", "-m", "isa", "-p", "no:cacheprovider", "-x"]
    files = MARKED
    if isa == "avx2vnni":  # all but int8's kernels are those of avx2
        files = [f for f in MARKED if "int8" in f]
    if (isa, _C.cpu_isa()) == ("avx512", "avx512vbmi"):  # all but the affine ones are the same
        args += ["-k", "affine"]
    run = python(isa, *args, *files, timeout=900)
    print(run.stdout[-4000:], run.stderr[-2000:])
    assert run.returncode == 0
    assert f"cpu ({isa})" in run.stdout and " passed" in run.stdout


# The core needs neither torch nor the package, which take seconds to import.
ALONE = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("_C", {_C.__file__!r})
core = module_from_spec(spec)
spec.loader.exec_module(core)
print(core.cpu_isa())
"""


@pytest.mark.parametrize("isa", ["", *_C.cpu_isas()])
def test_the_environment_chooses(isa: str) -> None:
    """An empty choice is none."""
    run = python(isa, "-c", ALONE)
    assert run.stdout.strip() == (isa or _C.cpu_isas()[0]), run.stderr


OP = """
import torch, torch_metalmm
torch.ops.metalmm.linear(torch.ones(1, 32), torch.ones(1, 32), None, "f32")
"""


@pytest.mark.parametrize(("isa", "code"), [("sse9", ALONE), ("AVX3", OP), ("avx512 ", ALONE)])
def test_an_unknown_instruction_set_is_an_error(isa: str, code: str) -> None:
    """ValueError that names the variable, the value and what is allowed, from the op too."""
    run = python(isa, "-c", code)
    said = f"METALMM_CPU_ISA: unknown '{isa}' on this machine; allowed: " + ", ".join(_C.cpu_isas())
    assert f"ValueError: {said}" in run.stderr, run.stdout + run.stderr

"""What the native files need: the core neither torch nor Python, the ops no Python, the module of
Python no torch. And which ops a torch is given."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_metalmm import _C
from torch_metalmm.ops import library_of

FOLDER = Path(_C.__file__).parent
PYTHON = re.compile(r"_?Py")
TORCH = re.compile(r"_?_Z\w*?(2at|3c10|5torch)[A-Z0-9]")
elf = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")


def file(name: str) -> Path:
    (found,) = FOLDER.glob(name)
    return found


CORE, OPS = "libmetalmm_core.*", library_of(torch.__version__, FOLDER).name
MODULE = Path(_C.__file__).name


def undefined(name: str) -> list[str]:
    from elftools.elf.elffile import ELFFile

    with file(name).open("rb") as opened:
        symbols = ELFFile(opened).get_section_by_name(".dynsym").iter_symbols()
        return [s.name for s in symbols if s.entry.st_shndx == "SHN_UNDEF" and s.name]


def dynamic(name: str) -> dict[str, list[str]]:
    """{tag: its strings}: what is needed, and where the loader looks."""
    from elftools.elf.elffile import ELFFile

    found: dict[str, list[str]] = {}
    with file(name).open("rb") as opened:
        for tag in ELFFile(opened).get_section_by_name(".dynamic").iter_tags():
            for kind in ("needed", "runpath", "rpath"):
                if hasattr(tag, kind):
                    found.setdefault(kind, []).append(getattr(tag, kind))
    return found


@elf
@pytest.mark.parametrize(
    ("name", "has_torch", "has_python"),
    [(CORE, False, False), (OPS, True, False), (MODULE, False, True)],
    ids=["core", "ops", "module"],
)
def test_what_each_file_takes(name: str, has_torch: bool, has_python: bool) -> None:
    names = undefined(name)
    assert any(map(TORCH.match, names)) == has_torch
    assert any(map(PYTHON.match, names)) == has_python


@elf
def test_the_libraries_that_are_loaded_with_each_file() -> None:
    """The core from beside what needs it; torch's by name alone; no OpenMP beside torch's, which
    would have threads of its own."""
    core = file(CORE).name
    ops = dynamic(OPS)
    assert {core, "libtorch_cpu.so", "libc10.so"} <= {*ops["needed"]}
    for name in (CORE, OPS, MODULE):
        found = dynamic(name)
        assert found.get("runpath", []) == ["$ORIGIN"] and "rpath" not in found
        others = {*found["needed"]} - {core, "libtorch_cpu.so", "libc10.so"}
        plain = re.compile(
            r"(libstdc\+\+|libm|libgcc_s|libc|libdl|libpthread|ld-linux-\S+)\.so\.\d+"
        )
        assert all(map(plain.fullmatch, others)), others


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_ops_use_the_openmp_of_torch() -> None:
    """One library of OpenMP in a process that has torch and the ops."""
    code = """
import torch, torch_metalmm
w = torch.ops.metalmm.quantize(torch.ones(512, 1024), "q4_0")
torch.ops.metalmm.linear(torch.ones(64, 1024), w, None, "q4_0")
names = {line.split("/")[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
print(sorted(n for n in names if n.startswith(("libgomp", "libomp", "libiomp"))))
"""
    assert len(eval(python(code))) == 1


def test_plans_need_no_torch() -> None:
    """The module is imported and plans alone; what only the ops know says so."""
    code = """
import sys
from torch_metalmm import _C
assert _C.plan(m=1, n=8, k=32, format="q4_0", chip="m1")["passes"]
for call in (lambda: _C.cpu_strategy(1, "f32"), _C.install_recorder, _C.install_emulator):
    try:
        call()
    except RuntimeError as error:
        print(error)
assert "torch" not in sys.modules
"""
    assert python(code) == "torch_metalmm: the ops are not loaded; import torch first\n" * 3


# ---- which ops


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A folder with ops for two minors, and files of other names."""
    for name in ("_ops_t2_9.so", "_ops_t2_13.so", "_C.cpython-312-darwin.so", "_ops_t2.so"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git1234"])
def test_the_ops_are_those_of_the_minor(installation: Path, version: str) -> None:
    assert library_of(version, installation) == installation / "_ops_t2_13.so"


@pytest.mark.parametrize("version", ["2.1.0", "2.14.0", "3.13.0"])
def test_a_minor_without_ops(installation: Path, version: str) -> None:
    """One line: the torch, the minors that are there in their order, the command."""
    with pytest.raises(ImportError) as caught:
        library_of(version, installation)
    line = str(caught.value)
    assert f"no ops for torch {version}; this installation has those for torch 2.9, 2.13. " in line
    assert "pip install" in line and "--no-binary torch_metalmm" in line and "\n" not in line


def test_an_installation_without_ops(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="has those for torch none"):
        library_of("2.13.0", tmp_path)


def test_importing_beside_another_torch_is_an_error() -> None:
    """Of another minor; of this one, but built in another way than that of the wheels."""
    code = """
import torch
def load_library(path):
    raise OSError(f"{path}: undefined symbol: _ZN2at4nameEv")
torch.ops.load_library = load_library
for version in ("2.99.0", torch.__version__):
    torch.__version__ = version
    try:
        import torch_metalmm
    except ImportError as error:
        print(error)
"""
    other, same = python(code).splitlines()
    assert other.startswith("torch_metalmm: no ops for torch 2.99.0")
    assert "do not load into torch" in same and "undefined symbol: _ZN2at4nameEv" in same

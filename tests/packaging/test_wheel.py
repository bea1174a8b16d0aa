"""cmake/make_wheel.py: the wheel of several torches and Pythons, and what is looked for in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from places import COMPILER, ROOT

sys.path.insert(0, str(ROOT / "cmake"))
import make_wheel  # noqa: E402
import targets  # noqa: E402
import torch_version  # noqa: E402
import torch_wheels  # noqa: E402

TORCHES = "2.10=17=/a/include;2.15=20=/b/include"
PYTHONS = ".cpython-312-x86_64-linux-gnu.so=/c;.cpython-310-x86_64-linux-gnu.so=/d"
TEXT = 'extern "C" int in_{}() {{ return 1; }}'
SUFFIX = ".so" if sys.platform != "darwin" else ".dylib"


Made = tuple[Path, list[torch_wheels.Torch]]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_TORCHES", TORCHES)
    monkeypatch.setenv("METALMM_PYTHONS", PYTHONS)


def test_what_is_compiled_for_several(several: None) -> None:
    assert targets.options()[:2] == [f"-DTORCHES={TORCHES}", f"-DPYTHONS={PYTHONS}"]
    assert targets.modules() == [
        "_ops_t2_10.so",
        "_ops_t2_15.so",
        "_C.cpython-312-x86_64-linux-gnu.so",
        "_C.cpython-310-x86_64-linux-gnu.so",
    ]
    assert targets.requirement() == "torch>=2.10,<2.16,!=2.11.*,!=2.12.*,!=2.13.*,!=2.14.*"
    assert targets.python_tag() == "cp310.cp312"


def test_an_installation_from_source_is_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("METALMM_TORCHES", "METALMM_PYTHONS"):
        monkeypatch.delenv(name, raising=False)
    (torch_there,), (python_there,) = targets.torches(), targets.pythons()
    minor, standard, include = torch_there.split("=")
    assert targets.requirement() == f"torch=={minor}.*"
    assert Path(include, "ATen", "ATen.h").is_file() and standard in ("17", "20")
    assert python_there.startswith(f"{sysconfig.get_config_var('EXT_SUFFIX')}=")


def test_a_python_that_has_no_tag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METALMM_PYTHONS", ".pypy310-pp73-x86_64-linux-gnu.so=/c")
    with pytest.raises(ValueError, match="METALMM_PYTHONS: .*pypy310.*; modules of CPython"):
        targets.python_tag()


@pytest.mark.parametrize("version", ["2.9.1", "2.16.0"])
def test_a_torch_that_the_sources_are_not_for(version: str) -> None:
    with pytest.raises(ValueError, match=f"torch {version}"):
        targets.torch_target(version, "/include")


def test_the_range_of_all_minors_has_no_hole() -> None:
    assert torch_version.requirement(torch_version.MINORS) == "torch>=2.10,<2.16"


def test_this_python_is_a_target() -> None:
    suffix, _, include = make_wheel.python_of(sys.executable).partition("=")
    assert suffix == sysconfig.get_config_var("EXT_SUFFIX")
    assert Path(include, "Python.h").is_file()


def compile_library(out: Path, text: str) -> Path:
    """A shared library, of which the symbols it does not define are looked for at load."""
    source = out.with_suffix(".cpp")
    source.write_text(text)
    flags = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    command = [*COMPILER, "-shared", "-fPIC", *flags, str(source), "-o", str(out)]
    subprocess.run(command, check=True)
    return out


@pytest.fixture(scope="module")
def torch_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a torch whose libraries have a function each."""
    folder = tmp_path_factory.mktemp("torch")
    out = folder / "torch-2.13.7-cp312-cp312-any.whl"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("torch/include/ATen/ATen.h", "#pragma once\n")
        for name in torch_wheels.LIBRARIES:
            made = compile_library(folder / f"{name}{SUFFIX}", TEXT.format(name))
            archive.write(made, f"torch/lib/{made.name}")
    return out


def mangled(name: str) -> str:
    return f"_{name}" if sys.platform == "darwin" else name


def test_headers_and_symbols_of_a_wheel_are_kept(
    torch_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel is fetched once, by the minor; it is not kept."""
    fetched = []

    def download(minor: str, platforms: tuple[str, ...], folder: Path) -> Path:
        fetched.append((minor, platforms))
        return Path(shutil.copy(torch_wheel, folder))

    monkeypatch.setattr(torch_wheels, "download", download)
    for _ in range(2):
        torch = torch_wheels.torch_of("2.13", tmp_path / "cache")
        assert torch.version == "2.13.7" and (torch.include / "ATen" / "ATen.h").is_file()
        assert {mangled(f"in_{name}") for name in torch_wheels.LIBRARIES} <= torch.exported
    assert fetched == [("2.13", torch_wheels.this_machine())]
    assert [f.name for f in (tmp_path / "cache").iterdir()] == ["2.13.7"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, torch_wheel: Path) -> Made:
    """A wheel of which each library takes what it may, and one symbol that is nowhere."""
    folder = tmp_path_factory.mktemp("made")
    torch_wheels.unpack(torch_wheel, folder)
    package = folder / "torch_metalmm"
    package.mkdir()
    takes = 'extern "C" int {0}();\nint (*p_{0})() = {0};\n'
    core = 'extern "C" int of_core() { return 1; }\n' + takes.format("in_no_library")
    compile_library(package / f"{make_wheel.CORE}{SUFFIX}", core)
    ops = ("of_core", "in_libc10", "GOMP_parallel", "in_libtorch_python")
    compile_library(package / "_ops_t2_13.so", "".join(map(takes.format, ops)))
    module = ("of_core", "PyErr_Occurred", "_Py_Dealloc", "in_libtorch_cpu")
    compile_library(package / "_C.cpython-312.so", "".join(map(takes.format, module)))
    out = folder / "torch_metalmm-1-cp312-none-any.whl"
    with zipfile.ZipFile(out, "w") as archive:
        for file in package.iterdir():
            if file.suffix != ".cpp":
                archive.write(file, f"torch_metalmm/{file.name}")
    return out, [torch_wheels.torch_of("2.13", folder)]


def test_symbols_that_are_nowhere(made: Made) -> None:
    """The core finds nothing, the module Python, the ops torch and its OpenMP."""
    assert make_wheel.problems(*made) == [
        f"{make_wheel.CORE}{SUFFIX}: {mangled('in_no_library')}",
        f"_C.cpython-312.so: {mangled('in_libtorch_cpu')}",
        f"_ops_t2_13.so: {mangled('in_libtorch_python')} is not in torch 2.13.7",
    ]


def test_a_wheel_that_is_too_large(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    size = made[0].stat().st_size
    monkeypatch.setattr(make_wheel, "MOST_BYTES", size)
    assert not [line for line in make_wheel.problems(*made) if "bytes" in line]
    monkeypatch.setattr(make_wheel, "MOST_BYTES", size - 1)
    assert make_wheel.problems(*made)[-1] == f"{size} bytes; {size - 1} are allowed"

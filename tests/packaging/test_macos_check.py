"""`make macos-check` on a wheel made here: what it says of symbols and of files."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import macos_check
import pytest
from macos_build import compile_for_macos, sources
from macos_check import LIBRARIES, Objects, check, markdown
from places import ROOT

HEADER = "#pragma once\nnamespace at { int present(); int absent(); }\n"


@pytest.fixture
def wheel(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The wheel of a torch whose libraries have one of the two functions its header declares, and
    the text that the test gives."""
    folder = tmp_path / "wheel"
    folder.mkdir()
    library = folder / "library.cpp"
    library.write_text(
        'namespace at { __attribute__((visibility("default"))) int present() { return 1; } }\n'
        f'extern "C" const char text[] = "{getattr(request, "param", "computeCommandEncoder")}";\n'
    )
    assert compile_for_macos(library, folder / "library.o") == ""
    out = folder / "torch-2.13.7-cp311-cp311-macosx_14_0_arm64.whl"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("torch/include/ATen/ATen.h", HEADER)
        archive.writestr("torch/include/torch/library.h", "#include <ATen/ATen.h>\n")
        for name in LIBRARIES:
            archive.write(folder / "library.o", f"torch/lib/{name}.dylib")
    return out


def test_what_is_missing_and_what_does_not_compile(wheel: Path, tmp_path: Path) -> None:
    """Symbols of the libraries and of the system are found, and those of other files."""
    texts = {
        "uses.cpp": "#include <ATen/ATen.h>\n#include <cstdlib>\nint other();\n"
        "int f() { std::free(nullptr); return at::present() + at::absent() + other(); }\n",
        "other.cpp": "int other() { return 2; }\n",
        "wrong.cpp": "#include <ATen/ATen.h>\nint g() { return at::renamed(); }\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = [(tmp_path / name, ()) for name in texts]
    row = check(wheel, files, Objects(tmp_path), tmp_path)
    assert (row.version, row.compiled, row.found) == ("2.13.7", 2, 1)
    assert row.missing == ["__ZN2at6absentEv"] and row.concurrent == []
    assert list(row.errors) == ["wrong.cpp"] and "renamed" in row.errors["wrong.cpp"]
    assert markdown([row], 3).endswith("| 2.13.7 | 2 of 3 | 1 | `__ZN2at6absentEv` |")


SENT = ("computeCommandEncoderWithDispatchType:", "memoryBarrierWithScope:", "memoryBarrier")


@pytest.mark.parametrize("wheel", SENT, indirect=True)
def test_encoders_that_run_passes_side_by_side(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone a reason to fail."""
    (file := tmp_path / "plain.cpp").write_text("int f() { return 1; }\n")
    monkeypatch.setattr(macos_check, "sources", lambda _: [(file, ())])
    monkeypatch.setattr(sys, "argv", ["macos_check", "--wheels", str(wheel.parent), "2.13"])
    assert macos_check.main() == 1
    said = capsys.readouterr().err
    assert re.search(
        r"torch 2.13.7: its encoders may be concurrent: (computeComm|memoryBarr)", said
    )


def test_every_file_of_the_module_is_there(tmp_path: Path) -> None:
    """What CMake compiles on a Mac: the Metal engine, and the kernels of its instruction sets."""
    found = sources(tmp_path)
    names = [file.name for file, _ in found]
    assert {f.name for f in (ROOT / "csrc" / "mps").glob("*.mm")} <= set(names)
    rooms = ("plan", "hooks", "ops", "gpu", "cpu", "mps", "emulator", "cuda", "python")
    plain = {f for room in rooms for f in (ROOT / "csrc" / room).glob("*.cpp")}
    assert plain <= {file for file, _ in found} and "shaders.cpp" in names
    isas = [(f.parent.name, *defines) for f, defines in found if f.name == "isa.cpp"]
    scalar = ("-DMM_ISA=scalar", "-DMM_SCALAR")
    assert sorted(isas) == [
        *(("cpu", "-DMM_ISA=neon", f"-DMM_PART={part}") for part in range(3)),
        ("cpu", *scalar),
        ("int8", "-DMM_ISA=neon"),
        ("int8", "-DMM_ISA=neon_dot"),
        ("int8", *scalar),
    ]
    assert all(file.is_file() for file, _ in found)


def test_no_name_that_compilers_mangle_differently() -> None:
    """const_data_ptr<T> of torch 2.10 and 2.11: csrc/ops/tensors.h has another way."""
    files = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".cpp", ".h", ".mm")]
    users = [f.name for f in files if re.search(r"\.const_data_ptr<\w+>\(\)", f.read_text())]
    assert users == ["tensors.h"]  # its comment

"""What `make macos-check` compiles is all that a Mac would."""

from __future__ import annotations

import re
from pathlib import Path

from macos_build import sources
from places import ROOT


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
        *(("cpu", "-DMM_ISA=neon", f"-DMM_PART={part}") for part in range(4)),
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

"""The rooms of csrc/ and metal/: what each may include."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

PLAN, OPS = {"metal", "csrc/plan"}, {"metal", "csrc/plan", "csrc/ops"}
HOOKS = {"csrc/hooks"}
ENGINES = {f"csrc/{name}" for name in ("cpu", "mps", "emulator", "cuda")}
# {room: the rooms that its files may include, beside itself}. A folder without a row is part of the
# room above it.
ARROWS: dict[str, set[str]] = {
    "metal": set(),
    "csrc/plan": {"metal"},
    "csrc/hooks": PLAN,  # what the core, which has no torch, asks of the ops
    "csrc/ops": PLAN,
    "csrc/gpu": OPS | HOOKS,  # what the engines that execute plans share
    "csrc/cpu": OPS | HOOKS,
    "csrc/mps": OPS | HOOKS | {"csrc/gpu"},
    "csrc/emulator": PLAN | HOOKS,
    "csrc/cuda": OPS | HOOKS | {"csrc/gpu"},
    "csrc/python": OPS | HOOKS | ENGINES,
    "csrc/emulator/runtime": set(),  # compiled into each library of shaders, not into the module
    "csrc/msl/language": set(),  # the stand-in for Metal's headers, which shaders include
    "csrc/msl/library": {"csrc/msl/language"},
    "csrc/msl/host": {"csrc/msl/language", "csrc/msl/library"},
    "csrc/msl/warp": {"csrc/msl/language", "csrc/msl/library"},  # what the GPUs' targets share
    "csrc/msl/nvptx": {f"csrc/msl/{name}" for name in ("language", "library", "warp")},
    "csrc/msl/spirv": {f"csrc/msl/{name}" for name in ("language", "library", "warp")},
    "csrc/msl": {f"csrc/msl/{name}" for name in ("language", "library", "host", "nvptx", "spirv")},
}
# {room: the file of another room that it may include: what two sides of a binary interface share}
INTERFACES = {
    "csrc/cuda": "csrc/msl/nvptx/operands.h",
    "csrc/emulator": "csrc/msl/host/abi.h",
    "csrc/emulator/runtime": "csrc/msl/host/abi.h",
}
TORCH, PYTHON, APPLE = r"ATen|c10|torch", r"pybind11|Python\.h", r"Metal|Foundation|ATen/native/mps"
# {room: the libraries that its files may include, by the first word of the path}
LIBRARIES = {
    **dict.fromkeys(("csrc/ops", "csrc/gpu", "csrc/cpu", "csrc/cuda"), {TORCH}),
    "csrc/mps": {TORCH, APPLE},
    "csrc/python": {PYTHON},
}
_INCLUDE = re.compile(r'^\s*#\s*(?:include|import) (?:"([^"]+)"|<([^>]+)>)', re.M)


def room_of(file: str) -> str:
    """The room of a file, by the longest name; "" outside of all."""
    return max((r for r in ARROWS if file.startswith(f"{r}/")), key=len, default="")


def found(include: str, file: str) -> str:
    """What an include in quotation marks names, from the root of the repository; "" if nothing."""
    stand_in = ["csrc/msl"] if file.startswith("csrc/msl/") else []
    for folder in (os.path.dirname(file), "csrc", ".", *stand_in):
        path = os.path.normpath(os.path.join(folder, include))
        if (ROOT / path).is_file():
            return path
    return ""


def wrong_includes(file: str, text: str) -> Iterator[str]:
    """What `file`, by its path from the root of the repository, may not include."""
    room = room_of(file)
    for ours, library in _INCLUDE.findall(text):
        path = found(ours, file)
        if ours and not path:
            yield f"{file}: {ours} is not there"
        elif ours and not {room_of(path), path} & (ARROWS[room] | {room, INTERFACES.get(room)}):
            yield f"{file}: {room} includes {path}"
        for name in {TORCH, PYTHON, APPLE} - LIBRARIES.get(room, set()):
            if re.match(rf"(?:{name})(?:/|$)", library):
                yield f"{file}: {room} includes <{library}>"


def sources() -> list[Path]:
    files = [f for room in ("csrc", "metal") for f in sorted((ROOT / room).rglob("*"))]
    return [f for f in files if f.is_file() and f.suffix not in (".py", ".pyc", ".yaml")]


def test_no_arrow_runs_back() -> None:
    assert len(sources()) > 100
    wrong = [
        line
        for file in sources()
        for line in wrong_includes(str(file.relative_to(ROOT)), file.read_text())
    ]
    assert wrong == []

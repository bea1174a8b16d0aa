"""The build for macOS on this machine: CMake told that this is a Mac, ziglang's clang for arm64.

Apple's headers are not here; apple_stubs declares the few types that csrc/mps uses.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
import ziglang
from places import ROOT

from torch_metalmm.msl.build import zig

sys.path.insert(0, str(ROOT / "cmake"))
import targets  # noqa: E402
import torch_version  # noqa: E402

TORCH = Path(torch.__file__).parent
# Of what includes no header of torch.
STANDARD = re.findall(r"set\(CMAKE_CXX_STANDARD (\d+)\)", (ROOT / "CMakeLists.txt").read_text())[0]
# Headers of torch are of one function each, as CMakeLists.txt has it.
PER_OPERATOR = ("-DAT_PER_OPERATOR_HEADERS",)
STUBS = Path(__file__).with_name("apple_stubs")
# What libc++, its ABI library and libobjc have. ziglang has the list of libSystem's.
_LANGUAGE = re.compile(
    r"__ZN?K?St|__ZT[ISTV]N?K?St|__ZTVN10__cxxabiv1|__Znwm|__Znam|__Zd[la]P|___cxa_|___gxx_"
    r"|___dynamic_cast$|___isPlatformVersionAtLeast$|___dso_handle$|__Unwind_|_objc_"
)


@functools.cache
def _system() -> frozenset[str]:
    (tbd,) = Path(ziglang.__file__).parent.rglob("darwin/libSystem.tbd")
    return frozenset(re.findall(r"[\w$]+", tbd.read_text()))


def is_of_macos(symbol: str) -> bool:
    """Whether every program of macOS can take the symbol from the system."""
    return bool(_LANGUAGE.match(symbol)) or symbol in _system()


def python_headers(scratch: Path) -> Path:
    """The folder of this Python's headers. Debian's pyconfig.h includes another, by the target, and
    has none for macOS: then a folder of links to all headers, and to this machine's pyconfig.h."""
    folder = Path(sysconfig.get_paths()["include"])
    config = folder.parent / str(sysconfig.get_config_var("MULTIARCH")) / folder.name / "pyconfig.h"
    if not config.is_file():
        return folder
    links = scratch / "python"
    if not links.is_dir():
        links.mkdir()
        for file in folder.iterdir():
            (links / file.name).symlink_to(config if file.name == "pyconfig.h" else file)
    return links


@functools.cache
def uses_torch(file: Path) -> bool:
    """Whether a file of csrc includes a header of torch, or one of ours that does."""
    text = file.read_text()
    folders = (file.parent, ROOT / "csrc", ROOT)
    ours = (f / name for name in re.findall(r'#include "([^"]+)"', text) for f in folders)
    direct = re.search(r"#(include|import) <(ATen|c10|torch)/", text)
    return bool(direct) or any(uses_torch(f.resolve()) for f in ours if f.is_file())


def compile_for_macos(
    file: Path,
    out: Path,
    include: Path = TORCH / "include",
    version: str = torch.__version__,
    more: tuple[str, ...] = (),
) -> str:
    """The messages of clang for arm64 macOS 14, warnings as errors; "" if there are none.

    include: of a torch, of this version. A header (.h) is precompiled.
    """
    standard = torch_version.cxx_standard(version) if uses_torch(file) else STANDARD
    languages = {".mm": ["objective-c++", "-fobjc-arc"], ".h": ["c++-header"]}
    language = languages.get(file.suffix, ["c++"])
    options = ["-target", "aarch64-macos.14.0", "-x", *language, f"-std=c++{standard}", "-fblocks"]
    options += ["-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fvisibility=hidden", "-O1"]
    options += [f"-I{STUBS}", f"-I{ROOT / 'csrc'}", f"-I{ROOT}", *more]
    python = python_headers(out.parent)
    system = (include, include / "torch/csrc/api/include", pybind11.get_include(), python)
    options += [word for folder in system for word in ("-isystem", str(folder))]
    done = zig(
        "c++", *options, *(() if file.suffix == ".h" else ("-c",)), str(file), "-o", str(out)
    )
    assert done.returncode == 0 or done.stderr
    return done.stderr


def configure(folder: Path, *options: str, apple: bool = True) -> subprocess.CompletedProcess[str]:
    """CMake in folder/build, told that this is an Apple chip; what is built goes to folder/out."""
    lines = "set(APPLE TRUE)\nset(CMAKE_SYSTEM_PROCESSOR arm64)\n" if apple else ""
    (folder / "apple.cmake").write_text(lines)
    bin = Path(sys.executable).parent
    command = [str(bin / "cmake"), f"-S{ROOT}", f"-B{folder / 'build'}", "-GNinja"]
    command += [f"-DCMAKE_PROJECT_torch_metalmm_INCLUDE={folder / 'apple.cmake'}"]
    command += [f"-DCMAKE_MAKE_PROGRAM={bin / 'ninja'}", *targets.options()]
    command += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder / 'out'}"]
    command += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DPRECOMPILED=OFF", *options]
    (folder / "out").mkdir(exist_ok=True)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def sources(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """(file, options of its own) of all that a Mac compiles, once for each instruction set.

    folder: scratch. RuntimeError: CMake does not configure.
    """
    done = configure(folder, "-DMETAL_COMPILER=")
    if done.returncode:
        raise RuntimeError(done.stderr)
    build = folder / "build"
    for script, source, made in (
        ("mps/flatten.py", "metal", "shaders.cpp"),
        ("python/abi_names.py", "metal/abi.h", "abi_names.def"),
    ):
        command = [sys.executable, ROOT / "csrc" / script, ROOT / source, build / made]
        subprocess.run(command, check=True)
    kept = "-DMM_", *PER_OPERATOR, f"-I{build}"
    rows = json.loads((build / "compile_commands.json").read_text())
    return [
        (Path(row["file"]), tuple(w for w in shlex.split(row["command"]) if w.startswith(kept)))
        for row in rows
    ]

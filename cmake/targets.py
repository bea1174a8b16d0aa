"""The targets of the native code, as CMakeLists.txt takes them: torch minors and Pythons.

An installation from source has one of each, those of this interpreter; cmake/make_wheel.py makes
wheels for several, and says so to setup.py by METALMM_TORCHES and METALMM_PYTHONS.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

import torch_version


def torch_target(version: str, include: str | Path) -> str:
    """The ops for a torch, `include` the folder of its headers. ValueError: as minor_of()."""
    minor = torch_version.minor_of(version)
    return f"{minor}={torch_version.cxx_standard(version)}={include}"


def python_target(suffix: str, include: str | Path) -> str:
    """The module of a Python, whose name ends in `suffix`."""
    return f"{suffix}={include}"


def torches() -> list[str]:
    """The torch minors of METALMM_TORCHES; else the installed one. ValueError: as minor_of()."""
    if given := os.environ.get("METALMM_TORCHES"):
        return given.split(";")
    import torch

    return [torch_target(torch.__version__, Path(torch.__file__).parent / "include")]


def pythons() -> list[str]:
    """The Pythons of METALMM_PYTHONS; else this one."""
    if given := os.environ.get("METALMM_PYTHONS"):
        return given.split(";")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return [python_target(suffix, sysconfig.get_path("include"))]


def is_wheel_of_several() -> bool:
    return "METALMM_TORCHES" in os.environ


def requirement() -> str:
    """The torch that what is built needs."""
    if not is_wheel_of_several():
        return torch_version.to_run_with()
    return torch_version.requirement([torch.partition("=")[0] for torch in torches()])


def python_tag() -> str:
    """cp310.cp312: the first tag of a wheel with modules for these. ValueError: not CPython's."""
    numbers = [re.match(r"\.cpython-(\d+)-", python) for python in pythons()]
    if not all(numbers):
        raise ValueError(f"METALMM_PYTHONS: {pythons()}; modules of CPython are allowed")
    return ".".join(sorted((f"cp{n[1]}" for n in numbers if n), key=lambda tag: int(tag[2:])))


def name() -> str:
    """The folder of a build for these."""
    if is_wheel_of_several():
        return "wheel"
    return f"{sys.implementation.cache_tag}-torch{torch_version.installed()}"


def modules() -> list[str]:
    """The files that a build makes for these, beside the core."""
    minors = [torch.partition("=")[0] for torch in torches()]
    suffixes = [python.partition("=")[0] for python in pythons()]
    return [f"_ops_t{m.replace('.', '_')}.so" for m in minors] + [f"_C{s}" for s in suffixes]


def options() -> list[str]:
    """The arguments of cmake."""
    import pybind11

    # Files that begin with a precompiled header are not what ccache finds again.
    launched = "CMAKE_CXX_COMPILER_LAUNCHER" in os.environ and not is_wheel_of_several()
    return [
        f"-DTORCHES={';'.join(torches())}",
        f"-DPYTHONS={';'.join(pythons())}",
        f"-DPYBIND11_INCLUDE={pybind11.get_include()}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPRECOMPILED={'OFF' if launched else 'ON'}",
    ]

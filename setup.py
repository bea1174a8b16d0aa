"""Builds the native code with CMake: for the installed torch and this Python, or as
cmake/make_wheel.py asks. The rest is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
PACKAGE = "torch_metalmm"
sys.path.insert(0, str(ROOT / "cmake"))
import targets  # noqa: E402

# The oldest macOS that has Metal 3.1, and that torch's wheels run on; Python's own may be older.
os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")
# The kernels of the CUDA engine, which python -m torch_metalmm.msl.ptx has written: only on
# request, so that a wheel does not depend on what was run before.
WITH_PTX = os.environ.get("METALMM_PTX", "0") not in ("", "0")


def program(name: str) -> str:
    """`name` beside this Python (a build environment's bin folder), else from PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} not found: pip install {name}")
    return found


def native_files(folder: Path) -> list[Path]:
    """What cmake makes, in a folder of the package."""
    return [f for end in ("so", "dylib", "metallib") for f in folder.glob(f"*.{end}")]


class PurePython(build_py):
    """The Python files, into a folder that holds nothing of an earlier build."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        if WITH_PTX and not list(Path(ROOT, PACKAGE, "ptx").glob("*.ptx")):
            raise RuntimeError("METALMM_PTX is set: run python -m torch_metalmm.msl.ptx first")
        super().run()


class CMakeBuild(build_ext):
    """`cmake -G Ninja`, then a parallel build, in build/."""

    def copy_extensions_to_source(self) -> None:
        """An editable installation takes all that cmake made: libraries, modules, compiled shaders.

        What an earlier build left goes: it would be taken for this one's.
        """
        for file in native_files(Path(ROOT, PACKAGE)):
            file.unlink()
        for file in native_files(Path(self.build_lib, PACKAGE)):
            self.copy_file(str(file), str(ROOT / PACKAGE / file.name))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        for file in {*target.glob("_*.so")} - {target / name for name in targets.modules()}:
            file.unlink()  # of an earlier build; what cmake makes again it replaces
        build = ROOT / "build" / targets.name()
        build.mkdir(parents=True, exist_ok=True)
        cmake = program("cmake")
        subprocess.run(
            [
                cmake,
                f"-S{ROOT}",
                f"-B{build}",
                "-GNinja",
                f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
                *targets.options(),
                *os.environ.get("CMAKE_ARGS", "").split(),
            ],
            check=True,
        )
        # A compiler takes 0.5 GB; containers see all CPUs of the host.
        jobs = os.environ.get("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))
        subprocess.run([cmake, "--build", str(build), "-j", jobs], check=True)


class Wheel(bdist_wheel):
    """A wheel of several Pythons is named after each, and after none of their binary interfaces."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        if not targets.is_wheel_of_several():
            return python, abi, system
        if sys.platform == "darwin":  # the folder's name may say universal2, as Python does
            oldest = os.environ["MACOSX_DEPLOYMENT_TARGET"].replace(".", "_")
            system = f"macosx_{oldest}_{os.uname().machine}"
        return targets.python_tag(), "none", system


setup(
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"bdist_wheel": Wheel, "build_ext": CMakeBuild, "build_py": PurePython},
    install_requires=[targets.requirement(), "numpy"],
    package_data={
        PACKAGE: [
            "py.typed",
            *(["ptx/*.ptx"] if WITH_PTX else []),
        ],
        f"{PACKAGE}.formats": ["tables/*.h"],
        f"{PACKAGE}.tools": ["issue_cycles.json"],
        f"{PACKAGE}.bench.models": ["loomings.txt"],
        f"{PACKAGE}.bench": ["roof.cpp"],
    },
)

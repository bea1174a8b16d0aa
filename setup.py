"""Builds torch_metalmm._C with CMake against the installed torch. The rest is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
PACKAGE = "torch_metalmm"
sys.path.insert(0, str(ROOT / "cmake"))
import torch_version  # noqa: E402

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
        """An editable installation also takes the shaders that cmake compiled.

        Where it made none, those of an earlier text go: they would be taken for this module's.
        """
        super().copy_extensions_to_source()
        for file in Path(ROOT, PACKAGE).glob("*.metallib"):
            file.unlink()
        for file in Path(self.build_lib, PACKAGE).glob("*.metallib"):
            self.copy_file(str(file), str(ROOT / PACKAGE / file.name))

    def build_extension(self, ext: Extension) -> None:
        import pybind11
        import torch

        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{torch.__version__}"
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
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DTORCH_DIR={Path(torch.__file__).parent}",
                f"-DTORCH_CXX_STANDARD={torch_version.cxx_standard(torch.__version__)}",
                *os.environ.get("CMAKE_ARGS", "").split(),
            ],
            check=True,
        )
        # A compiler takes 0.5 GB; containers see all CPUs of the host.
        jobs = os.environ.get("MAX_JOBS", str(min(os.cpu_count() or 1, 8)))
        subprocess.run([cmake, "--build", str(build), "-j", jobs], check=True)


setup(
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": PurePython},
    install_requires=[torch_version.to_run_with(), "numpy"],
    package_data={
        PACKAGE: [
            "py.typed",
            "formats.def",
            *(["ptx/*.ptx"] if WITH_PTX else []),
        ],
        f"{PACKAGE}.formats": ["tables/*.h"],
        f"{PACKAGE}.tools": ["issue_cycles.json"],
    },
)

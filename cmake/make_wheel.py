"""One wheel for several torches and several Pythons: `make wheel`.

    python cmake/make_wheel.py [--torch 2.10 2.15] [--python python3.10 python3.14] [--out dist]

Compiles the core once, the ops with the headers of each torch, whose wheel is downloaded but not
installed (torch_wheels.py), and the module of each Python; packs them; and looks for every symbol
that a file in the wheel takes in the libraries of its torch. On Linux the wheel is for the machine
it was made on: `auditwheel repair`, in a manylinux container, gives it its name for others.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import targets
import torch_version
import torch_wheels

ROOT = Path(__file__).resolve().parent.parent
# A wheel for macOS has metalmm.metallib, too: some 21 MB, by an estimate from the shaders' bitcode.
MOST_BYTES = 50_000_000 if sys.platform == "darwin" else 25_000_000
CORE = "libmetalmm_core"
# Symbols of torch's OpenMP, which its library loads, and of Python, which is the process.
_FROM_OPENMP = re.compile(r"GOMP_\w+|omp_\w+|__kmpc_\w+")
_FROM_PYTHON = re.compile(r"_?_?Py\w+")
_ASK = (
    "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_path('include'), sep='=')"
)


def python_of(interpreter: str) -> str:
    """The target of an interpreter. CalledProcessError, OSError: it is none."""
    said = subprocess.run([interpreter, "-c", _ASK], capture_output=True, text=True, check=True)
    suffix, _, include = said.stdout.strip().partition("=")
    if not Path(include, "Python.h").exists():
        raise FileNotFoundError(f"--python: {interpreter} has no headers in {include}")
    return targets.python_target(suffix, include)


def build(torches: list[str], pythons: list[str], out: Path) -> Path:
    """The wheel. The environment needs what pyproject.toml requires to build, and no torch."""
    environment = os.environ | {
        "METALMM_TORCHES": ";".join(torches),
        "METALMM_PYTHONS": ";".join(pythons),
    }
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        made = [*command, "--verbose", "-w", folder, str(ROOT)]
        subprocess.run(made, env=environment, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(wheel.replace(out / wheel.name))


def not_found(folder: Path, torches: list[torch_wheels.Torch]) -> Iterator[str]:
    """A line for each symbol that a library in `folder`, of a wheel, takes from nowhere."""
    (core,) = folder.glob(f"{CORE}.*")
    ours = torch_wheels.exported(core)
    for name in sorted(torch_wheels.taken(core)):
        yield f"{core.name}: {name}"
    for module in folder.glob("_C.*.so"):
        for name in sorted(torch_wheels.taken(module) - ours):
            if not _FROM_PYTHON.fullmatch(name):
                yield f"{module.name}: {name}"
    for torch in torches:
        (module,) = folder.glob(
            f"_ops_t{torch_version.minor_of(torch.version).replace('.', '_')}.so"
        )
        for name in sorted(torch_wheels.taken(module) - ours - torch.exported):
            if not _FROM_OPENMP.fullmatch(name):
                yield f"{module.name}: {name} is not in torch {torch.version}"


def problems(wheel: Path, torches: list[torch_wheels.Torch]) -> list[str]:
    """The faults of a wheel."""
    size = wheel.stat().st_size
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        found = list(not_found(Path(folder, "torch_metalmm"), torches))
    if size > MOST_BYTES:
        found.append(f"{size} bytes; {MOST_BYTES} are allowed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="+", default=torch_version.MINORS, metavar="MINOR")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="INTERPRETER")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "torch", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    a = parser.parse_args()
    torches = [torch_wheels.torch_of(minor, a.cache.resolve()) for minor in a.torch]
    wheel = build(
        [targets.torch_target(t.version, t.include) for t in torches],
        [python_of(p) for p in a.python],
        a.out,
    )
    found = problems(wheel, torches)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, torch", *(t.version for t in torches))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

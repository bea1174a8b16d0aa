"""Wheels of torch that are not installed: headers to compile against, symbols to find.

python cmake/torch_wheels.py --cache build/torch 2.10 2.15     fetches what a build needs of them
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch_version

# The libraries whose symbols a module of ops takes.
LIBRARIES = ("libtorch_cpu", "libc10")
# The platforms of torch's wheels, as pip has them: each minor has one of a machine's.
PLATFORMS = {
    ("Linux", "x86_64"): ("manylinux_2_28_x86_64",),
    ("Linux", "aarch64"): ("manylinux_2_28_aarch64",),
    ("Darwin", "arm64"): tuple(f"macosx_{n}_0_arm64" for n in (11, 12, 13, 14)),
}
_PYTHON = "3.12"  # the Python of the wheel taken: headers and libraries are those of every Python
_DONE = "symbols.txt"  # is written last


@dataclass(frozen=True)
class Torch:
    version: str
    include: Path
    exported: frozenset[str]  # by the libraries, as nm prints them


def this_machine() -> tuple[str, ...]:
    """A row of PLATFORMS. KeyError: torch has no wheels for this machine."""
    return PLATFORMS[platform.system(), platform.machine()]


def download(minor: str, platforms: tuple[str, ...], folder: Path) -> Path:
    """The newest wheel of a minor version, which pip puts into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", f"--python-version={_PYTHON}", f"torch=={minor}.*"]
    subprocess.run([*command, *(f"--platform={name}" for name in platforms)], check=True)
    (wheel,) = folder.glob(f"torch-{minor}.*.whl")
    return wheel


def exported(library: Path) -> set[str]:
    """The symbols that a library defines for others."""
    flags = ["-gU"] if platform.system() == "Darwin" else ["-D", "--defined-only"]
    lines = _nm(*flags, str(library)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def taken(library: Path) -> set[str]:
    """The symbols that the loader has to find for a library, but for those that carry the version
    of a library of the system, or on a Mac that the linker found."""
    if platform.system() == "Darwin":
        lines = _nm("-mu", str(library)).splitlines()
        return {line.split("external ")[1].split()[0] for line in lines if "dynamically" in line}
    lines = _nm("-D", "--undefined-only", str(library)).splitlines()
    rows = [line.split() for line in lines if line.strip()]
    return {name for kind, name in rows if kind == "U" and "@" not in name}


def _nm(*arguments: str) -> str:
    return subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout


def torch_of(minor: str, cache: Path) -> Torch:
    """Headers and symbols of the newest torch of a minor version, for this machine: those in
    `cache`, or from its wheel (0.1 to 0.9 GB), which is not kept."""
    (at, *_) = [*cache.glob(f"{minor}.*/{_DONE}"), None]
    if at is None:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wheel = download(minor, this_machine(), Path(scratch))
            at = unpack(wheel, cache) / _DONE
    return Torch(at.parent.name, at.parent / "include", frozenset(at.read_text().split()))


def unpack(wheel: Path, cache: Path) -> Path:
    """The folder, by version, of headers and symbols of a wheel."""
    folder = cache / wheel.name.split("-")[1]
    symbols: set[str] = set()
    with tempfile.TemporaryDirectory(dir=cache) as scratch, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("torch/include/"):
                archive.extract(name, scratch)
            elif re.fullmatch(rf"torch/lib/({'|'.join(LIBRARIES)})\.(so|dylib)", name):
                symbols |= exported(Path(archive.extract(name, scratch)))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.move(Path(scratch, "torch", "include"), folder / "include")
    (folder / _DONE).write_text("\n".join(sorted(symbols)))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("minors", nargs="*", default=torch_version.MINORS, metavar="MINOR")
    a = parser.parse_args()
    for minor in a.minors:
        torch = torch_of(minor, a.cache)
        print(f"torch {torch.version}: {len(torch.exported)} symbols, {torch.include}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

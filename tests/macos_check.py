"""What a Mac would compile, against every torch that is supported: `make macos-check`.

    python tests/macos_check.py [--wheels FOLDER] [MINOR...]

For each minor version: downloads torch's macOS wheel (about 100 MB), compiles every file of the
module for arm64 macOS with its headers, and looks for every symbol that the module takes in its
libraries. Nothing is linked or run. Passes of the Metal engine rely on the order of torch's
encoder: libraries that could make one that runs passes side by side are reported. Prints the table,
and writes it to docs/macos-check.md if it is of all minors; exit status 1 if a file does not
compile, a symbol is missing or an encoder may be concurrent. About ten minutes on two cores.

--wheels keeps the downloads in FOLDER, and takes those that are there.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import support  # noqa: F401  (its modules by their plain names)

# isort: split
from macho import MachO, listed
from macos_build import (
    PER_OPERATOR,
    compile_for_macos,
    is_of_macos,
    python_headers,
    sources,
    torch_version,
    uses_torch,
)
from places import ROOT
from torch_wheels import LIBRARIES, PLATFORMS, download

PAGE = ROOT / "docs" / "macos-check.md"
_BLOCK = re.compile(r"(?<=<!-- make macos-check -->\n).*(?=\n<!-- end -->)", re.S)
# What a concurrent encoder is made with, and what orders passes in one.
_CONCURRENT = re.compile(rb"computeCommandEncoderWithDispatchType:|memoryBarrier\w*:?")
Source = tuple[Path, tuple[str, ...]]


@dataclass
class Row:
    """What came out for a torch."""

    version: str
    compiled: int = 0
    errors: dict[str, str] = field(default_factory=dict)  # by file
    found: int = 0  # symbols of torch
    missing: list[str] = field(default_factory=list)
    concurrent: list[str] = field(default_factory=list)  # messages to Metal in torch's libraries


class Objects:
    """Compiled files. Those that include no header of torch are compiled once; the others begin
    with a precompiled one, which takes a third of the time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: dict[Source, MachO | str] = {}
        python_headers(folder)  # made once, not by every thread

    def of(self, files: list[Source], include: Path, version: str) -> list[MachO | str]:
        """The objects; of a file that does not compile the messages."""
        header = self._folder / f"{version}.h"
        header.write_text('#include "ops/aten.h"\n#include <torch/library.h>\n')
        precompiled = header.with_suffix(".pch")
        if said := compile_for_macos(header, precompiled, include, version, PER_OPERATOR):
            return [said] * len(files)

        def one(source: Source) -> MachO | str:
            if source in self._shared:
                return self._shared[source]
            file, more = source
            out = self._folder / f"{abs(hash(source))}.o"
            if uses_torch(file) and file.suffix == ".cpp":
                more = (*dict.fromkeys((*more, *PER_OPERATOR)), "-include-pch", str(precompiled))
            said = compile_for_macos(file, out, include, version, more)
            result = said or MachO(out.read_bytes())
            if not uses_torch(file):
                self._shared[source] = result
            return result

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(one, files))


def wheel(minor: str, folder: Path) -> Path:
    """The newest macOS wheel of a minor version, downloaded into `folder` if it is not there."""
    there = list(folder.glob(f"torch-{minor}.*macosx*arm64.whl"))
    return max(there) if there else download(minor, PLATFORMS["Darwin", "arm64"], folder)


def unpack(path: Path, folder: Path) -> tuple[Path, set[str], set[str]]:
    """The folder of the headers; of the libraries: exports, and messages of _CONCURRENT."""
    exported: set[str] = set()
    concurrent: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.startswith("torch/include/"):
                archive.extract(name, folder)
        for library in LIBRARIES:
            data = archive.read(f"torch/lib/{library}.dylib")
            exported |= MachO(data).defined
            concurrent |= {found.decode() for found in _CONCURRENT.findall(data)}
    return folder / "torch" / "include", exported, concurrent


def check(path: Path, files: list[Source], objects: Objects, scratch: Path) -> Row:
    version = path.name.split("-")[1]
    include, exported, concurrent = unpack(path, scratch / version)
    row = Row(version, concurrent=sorted(concurrent))
    made = []
    results = objects.of(files, include, version)
    for (file, defines), result in zip(files, results, strict=True):
        if isinstance(result, str):
            row.errors[" ".join([file.name, *defines])] = result
        else:
            made.append(result)
    row.compiled = len(made)
    needed = set().union(*(m.undefined for m in made)) - set().union(*(m.defined for m in made))
    apple = {name for kind, _, name in listed(version) if kind == "class"}
    row.found = len(needed & exported)
    others = needed - exported - apple
    row.missing = sorted(n for n in others if not is_of_macos(n) and not re.match("__?Py", n))
    return row


def markdown(rows: list[Row], files: int) -> str:
    lines = ["| torch | files compiled | symbols of torch found | missing |", "|---|---|---|---|"]
    for row in rows:
        missing = ", ".join(f"`{name}`" for name in row.missing) or "none"
        lines.append(f"| {row.version} | {row.compiled} of {files} | {row.found} | {missing} |")
    return "\n".join(lines)


def keep(page: Path, block: str) -> None:
    """Puts the result of a run into the page, in the place of the last one."""
    page.write_text(_BLOCK.sub(lambda _: block, page.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    parser.add_argument("minors", nargs="*", default=torch_version.MINORS, metavar="MINOR")
    a = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        files, objects = sources(scratch), Objects(scratch)
        for minor in a.minors:
            start, wheels = time.monotonic(), a.wheels or scratch / "wheels"
            row = check(wheel(minor, wheels), files, objects, scratch)
            rows.append(row)
            for name, said in row.errors.items():
                print(f"torch {row.version}: {name}:\n{said}", file=sys.stderr)
            for name in row.concurrent:
                print(
                    f"torch {row.version}: its encoders may be concurrent: {name}", file=sys.stderr
                )
            seconds = time.monotonic() - start
            print(f"torch {row.version}: {row.compiled} files, {seconds:.0f} s", file=sys.stderr)
    block = f"{time.strftime('%Y-%m-%d')}\n\n{markdown(rows, len(files))}"
    print(block)
    if tuple(a.minors) == torch_version.MINORS:
        keep(PAGE, block)
    return int(any(row.errors or row.missing or row.concurrent for row in rows))


if __name__ == "__main__":
    sys.exit(main())

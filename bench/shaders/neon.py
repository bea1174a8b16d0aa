"""`python -m bench neon`: instructions of the CPU's products with one row of x on a Mac.

The kernels are compiled for aarch64 by the clang of the ziglang package and run by qemu-user, which
logs every instruction: what a second call adds is what a call executes. ggml's are of its own
files, for an M1: rows packed together, as llama.cpp repacks what has such a product, and rows as
they lie in the file.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch_metalmm import formats
from torch_metalmm.msl.build import compiled

from ..devices import ROOT
from ..tables import Table, to_markdown

HERE = Path(__file__).parent
PRODUCTS = ("exact", "int16", "int8")
# ggml's products: the type of x that one takes, and the rows that are packed for the other.
GGML = {
    "q4_k": ("q8_K", "8x4"), "q5_k": ("q8_K", "8x4"), "q6_k": ("q8_K", "8x4"),
    "q4_0": ("q8_0", "4x4"), "q8_0": ("q8_0", "4x4"), "iq4_xs": ("q8_K", None),
    "mxfp4": ("q8_0", "4x4"), "affine4_g64": None,
}  # fmt: skip
K, ROWS = 1024, 8
_TARGET = ["-target", "aarch64-linux-musl", "-static", f"-DMM_ROWS={ROWS}"]
_OURS = ["-O3", "-std=c++17", "-ffp-contract=off", "-Wno-psabi", f"-I{ROOT}/csrc", f"-I{ROOT}"]
_PEER = ["-O3", "-mcpu=apple_m1", "-ffunction-sections", "-fdata-sections", "-D_GNU_SOURCE"]
_LOG = "in_asm,exec,nochain"
_VECTOR_REGISTER = re.compile(r"\b[vqdshb]\d+\b")


class Count(NamedTuple):
    """Instructions for 32 weights, and those of them that compute on vectors."""

    all: float
    vector: float

    def __str__(self) -> str:
        return f"{self.all:.1f}, {self.vector:.1f}"


def executed(log: Iterator[str]) -> tuple[Counter[int], dict[int, str]]:
    """How often the instruction at each address ran, and what it is, of a log of qemu."""
    times: Counter[int] = Counter()
    text: dict[int, str] = {}
    for line in log:
        if line.startswith("0x"):
            address, _, instruction = line.split(maxsplit=2)
            text[int(address[:-1], 16)] = instruction
        elif line.startswith("Trace"):
            times[int(line.split("/")[1], 16)] += 1
    return times, text


def computes_on_vectors(instruction: str) -> bool:
    """False for loads and stores. Dot products are .byte: the log's disassembler is older."""
    name, _, operands = instruction.partition(" ")
    if name.startswith(("ld", "st", "prfm")):
        return False
    return name.startswith(".byte") or _VECTOR_REGISTER.search(operands) is not None


def count(program: Path, *arguments: str) -> Count:
    """The instructions that the second call executes. RuntimeError: qemu or the program fails."""

    def run(calls: int) -> tuple[Counter[int], dict[int, str]]:
        log = program.with_suffix(".log")
        qemu = ["qemu-aarch64", "-singlestep", "-d", _LOG, "-D", str(log)]
        done = subprocess.run([*qemu, program, *arguments, str(K), str(calls)], check=False)
        if done.returncode:
            raise RuntimeError(f"{program.name} {' '.join(arguments)}: exit {done.returncode}")
        with log.open(errors="replace") as lines:
            return executed(lines)

    (once, _), (twice, text) = run(1), run(2)
    added, per = twice - once, ROWS * K / 32
    vector = sum(n for address, n in added.items() if computes_on_vectors(text[address]))
    return Count(added.total() / per, vector / per)


def ours(folder: Path) -> dict[str, list[Count]]:
    """The counts of PRODUCTS for each format."""
    objects = []
    for name, file, more in (
        ("neon", "isa.cpp", ()),
        ("neon_dot", "int8/isa.cpp", ["-mcpu=generic+dotprod"]),
    ):
        objects.append(folder / f"{name}.o")
        file = ROOT / "csrc/cpu" / file
        compiled("c++", *_TARGET, *_OURS, *more, f"-DMM_ISA={name}", "-c", file, "-o", objects[-1])
    program = folder / "kernel"
    sources = (HERE / "neon_kernel.cpp", ROOT / "csrc/plan/format.cpp")
    compiled("c++", *_TARGET, *_OURS, *sources, *objects, "-o", program)
    return {f: [count(program, f, kind) for kind in PRODUCTS] for f in GGML}


def ggml(source: Path, folder: Path) -> dict[str, dict[str, Count]]:
    """{format: {ggml's function: its count}}. ValueError: `source` is no folder of ggml."""
    arm = source / "src/ggml-cpu/arch/arm"
    if not arm.is_dir():
        raise ValueError(f"--ggml {source}: has no src/ggml-cpu/arch/arm")
    include = [f"-I{source}/{d}" for d in ("include", "src", "src/ggml-cpu")]
    objects = [folder / "quants.o", folder / "repack.o"]
    compiled("cc", *_TARGET, *_PEER, *include, "-c", arm / "quants.c", "-o", objects[0])
    repack = ["-std=c++17", "-c", arm / "repack.cpp", "-o", objects[1]]
    compiled("c++", *_TARGET, *_PEER, *include, *repack)
    found: dict[str, dict[str, Count]] = {}
    for format, products in GGML.items():
        if products is None:
            continue
        x, packed = products
        of_w = re.sub("k$", "K", format)
        names = [f"vec_dot_{of_w}_{x}", *([f"gemv_{of_w}_{packed}_{x}"] if packed else [])]
        for name in names:
            defines = [f"-DMM_PRODUCT=ggml_{name}", *(["-DMM_REPACKED"] * name.startswith("gemv"))]
            program = folder / name
            link = [*defines, HERE / "neon_ggml.c", *objects, "-Wl,--gc-sections", "-o", program]
            compiled("cc", *_TARGET, *_PEER, *link)
            counted = count(program, str(formats.get(format).row_bytes(K)))
            found.setdefault(format, {})[name] = counted
    return found


def table(own: dict[str, list[Count]], peer: dict[str, dict[str, Count]]) -> Table:
    rows = []
    for format, counts in own.items():
        of_ggml = [*peer.get(format, {}).values()]
        least = min((c.all for c in of_ggml), default=None)
        cells = [f"{c}" + (f", {c.all / least:.2f}" if least else "") for c in counts]
        told = [str(c) for c in of_ggml] + ["–"] * (2 - len(of_ggml))
        rows.append([format, *cells, *told])
    columns = ["", *PRODUCTS, "ggml, as in the file", "ggml, repacked"]
    return Table("", columns, rows)


def print_(args: argparse.Namespace) -> None:
    """ValueError: no qemu-user, or another folder of ggml."""
    if not shutil.which("qemu-aarch64"):
        raise ValueError("neon: needs qemu-aarch64, of the package qemu-user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer = ggml(args.ggml, folder) if args.ggml else {}
        print(to_markdown(table(ours(folder), peer)))

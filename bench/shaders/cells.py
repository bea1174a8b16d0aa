"""The cost of a weight in the inner loop of gemv.

The loop is that of the compiled code: clang makes PTX of the text of metal/, with the function
constants of a specialised pipeline, and ptx.py counts. The cost of a weight is the instructions of
one turn of the loop along K, divided by the weights a lane takes in that turn: rows of W times
values of a piece. So x, its sums, addresses and the loop itself count, each shared among the rows
that use them; what a lane does once, before and after the loop, does not count. Loads are counted
and cost nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_metalmm import _C
from torch_metalmm.msl.build import CACHE, LANGUAGE, ROOT, compiled, digest
from torch_metalmm.msl.kernels import structs_of
from torch_metalmm.tools import cost_model

from ..tables import Table, replace_block, to_markdown
from . import chips, ptx

METAL = ROOT / "metal"
DTYPES = {"f32": "float", "f16": "half", "bf16": "bfloat"}

_PLAIN = "{x, x}, w, {y, x, x}, args, memory, at"
_ARRANGED = "{x, x}, x, w, {y, x, x}, args, memory, at"
_PAIR = "{x, x}, w, w, {y, x, x}, args, memory, at"
_MASKED = "x, x, w, {y, x, x}, args, memory, at"
_BATCHED = "batched_rows(metalmm::Struct::Pieces::kValues)"
# Strategy: header, kernel struct, rows of W that a turn of its loop takes, arguments of run().
STRATEGIES = {
    "gemv": ("gemv", "GemvOne", "GemvStandard::kRows", _PLAIN),
    "gemv_large_k": ("gemv", "GemvLong", "GemvLargeK::kRows", _PLAIN),
    "gemv_wide_n": ("gemv", "GemvWide", "GemvWideN::kRows", _PLAIN),
    "gemv_batched": ("gemv_batched", "GemvBatch", _BATCHED, _ARRANGED),
    "swiglu_up": ("swiglu", "SwigluGateUp", "SwigluUp::kRows * 2", _PAIR),
    "swiglu_down": ("swiglu", "SwigluDown", "GemvStandard::kRows", _MASKED),
}

# The constants of a pipeline for a feed-forward layer of Llama 8B: K = 14336, groups of 64 with f16
# scales, no epilogue, 4 rows of x for gemv_batched. N and K have no tails; x and W are aligned,
# rows of W packed, and their blocks begin and end at multiples of 8 bytes: the bits that plan()
# gives for this layer, each of which matters to some format.
CONSTANTS = {"K": 14336, "Group": 64, "ScaleType": 0, "Epilogue": 0, "Batch": 4}


@functools.cache
def constants() -> dict[str, int]:
    """CONSTANTS and Bounds."""
    names = ("f16", "q4_0", "affine4_g64")
    plans = (_C.plan(n=4096, k=CONSTANTS["K"], format=name, chip="m4-max") for name in names)
    bounds = functools.reduce(operator.or_, (p["passes"][0]["constants"]["bounds"] for p in plans))
    return CONSTANTS | {"Bounds": bounds}


# The loop along K is not unrolled, so that one turn takes one piece of each row; loops that the
# text unrolls are. Loop strength reduction off: it trades additions for registers by the addressing
# of NVIDIA's loads.
FLAGS = ["-target", "nvptx64-nvidia-cuda", "-Xclang", "-target-cpu", "-Xclang", "sm_90"]
FLAGS += ["-O3", "-S", "-ffp-contract=off", "-w"]
# A function constant has no value while the shader is compiled, and gets one when a pipeline is
# made: so the text is optimised without values, then its IR with them.
TEXT = [*LANGUAGE, f"-I{METAL}", "-emit-llvm"]
_IR = ["-x", "ir"]
_CONSTANT = re.compile(r"^@mm_fc_kConstant(\w+) = .*$", re.M)
for _option in ("unroll-allow-partial=0", "unroll-runtime=0", "disable-lsr"):
    FLAGS += ["-mllvm", f"-{_option}"]

_KERNEL = """#define MM_COUNTED(name, Struct) \\
  extern "C" void {strategy}_##name##_{dtype}( \\
      device const {type}* x, device const uchar* w, device {type}* y, \\
      constant metalmm::KernelArgs& args, threadgroup float4* memory, metalmm::Position at) {{ \\
    metalmm::{struct}<metalmm::Struct, {type}>::run({arguments}); \\
  }} \\
  extern "C" __attribute__((used)) constant uint weights_##name = \\
      metalmm::Struct::Pieces::kValues * metalmm::{rows};
#define MM_FORMAT(name, Struct) MM_COUNTED(name, Struct)
"""
_EACH = '#include "formats/each.h"\n'


@dataclass(frozen=True)
class Cell:
    """The inner loop of a kernel: its cost for `weights` weights; whether it has local memory."""

    format: str
    cost: ptx.Cost
    weights: int
    uses_local_memory: bool

    def per_weight(self, kind: str) -> float:
        """Instructions of a class of ptx.CLASSES."""
        return self.cost.counts[kind] / self.weights

    @property
    def cycles(self) -> float:
        """Issue cycles per weight."""
        return self.cost.cycles / self.weights


@functools.cache
def _version() -> str:
    return compiled("version")


def clang(text: str, *flags: str) -> str:
    """The code clang makes of a text, kept by what it includes. BuildError: clang's message."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        file, part = Path(folder) / "cells.cpp", Path(folder) / "cells.s"
        file.write_text(text)
        command = ("clang", *flags, str(file), "-o", "-")
        whole = text if _IR[1] in flags else compiled(*command, "-E", "-P")
        named = (flag.replace(f"{ROOT}/", "") for flag in flags)
        kept = CACHE / f"cells-{digest(_version(), *named, whole)}.s"
        if not kept.exists():
            part.write_text(compiled(*command))
            os.replace(part, kept)
    return kept.read_text()


def compile_text(text: str, **changed: int) -> str:
    """The PTX of a text in Metal Shading Language, its function constants those of constants() but
    for the `changed` ones.

    BuildError: the compiler's message.
    """
    ir = clang(text, *TEXT, *FLAGS)
    value = constants() | changed
    ir = _CONSTANT.sub(lambda m: f"@mm_fc_kConstant{m[1]} = constant i32 {value[m[1]]}", ir)
    return clang(ir, *_IR, *FLAGS)


def source(strategy: str, dtype: str, only: Sequence[str] = ()) -> str:
    """The text that instantiates a strategy for every format, or for those."""
    header, struct, rows, arguments = STRATEGIES[strategy]
    includes = f'#include "kernels/{header}.h"\n#include "entry.h"\n#include "formats/all.h"\n'
    kernel = _KERNEL.format(
        strategy=strategy, dtype=dtype, type=DTYPES[dtype], struct=struct, rows=rows,
        arguments=arguments,
    )  # fmt: skip
    structs = structs_of()
    each = "".join(f"MM_FORMAT({name}, {structs[name]})\n" for name in only)
    return "#include <metal_stdlib>\n" + includes + kernel + (each or _EACH)


@functools.cache
def count(strategy: str, dtype: str, only: tuple[str, ...] = ()) -> list[Cell]:
    """The cells of a strategy and a dtype of x for every format, or for those."""
    text = compile_text(source(strategy, dtype, only))
    functions = ptx.functions(text)
    out = []
    for name, weights in re.findall(r"\bweights_(\w+) = (\d+);", text):
        function = functions[f"{strategy}_{name}_{dtype}"]
        found = ptx.cost(ptx.main_loop(function), ptx.constant_halves(function))
        out.append(Cell(name, found, int(weights), ptx.uses_local_memory(function)))
    return out


def measure(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Cell]]:
    """count() of several strategies and dtypes."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(pairs, pool.map(lambda p: count(*p), pairs), strict=True))


# ---- the report


def table() -> Table:
    """The inner loops of gemv: instructions per weight, by class of ptx.CLASSES, of x f16; issue
    cycles per weight of every dtype of x, and of gemv_wide_n.
    """
    found = measure([*(("gemv", d) for d in ("f16", "f32", "bf16")), ("gemv_wide_n", "f16")])
    cycles = [f"cycles, {strategy}, x {dtype}" for strategy, dtype in found]
    columns = ["format", *ptx.CLASSES, "load, x f32", *cycles, "local memory"]
    rows = []
    for cells in zip(*found.values(), strict=True):
        half, single = cells[:2]
        row = [half.format, *(f"{half.per_weight(kind):.2f}" for kind in ptx.CLASSES)]
        row += [f"{single.per_weight('load'):.2f}", *(f"{c.cycles:.2f}" for c in cells)]
        rows.append([*row, "yes" if any(c.uses_local_memory for c in cells) else "no"])
    return Table("gemv, x f16: instructions per weight, and issue cycles", columns, rows)


# ---- what is committed of it


def chip_counts() -> dict[str, Any]:
    """The counts of torch_metalmm.tools.cost_model: issue cycles per weight, by strategy."""
    strategies = ("gemv", "gemv_batched")
    found = measure([(strategy, dtype) for strategy in strategies for dtype in DTYPES])
    out: dict[str, Any] = {"batch": CONSTANTS["Batch"]}
    for strategy in strategies:
        rows = zip(*(found[strategy, dtype] for dtype in DTYPES), strict=True)
        out[strategy] = {
            cells[0].format: dict(zip(DTYPES, (c.cycles for c in cells), strict=True))
            for cells in rows
        }
    return out


def write() -> list[Path]:
    """Rewrites every committed figure that follows from the compiled loops; the files."""
    text = json.dumps(chip_counts(), indent=1)
    rows = re.sub(r"\{\s+([^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", text)
    cost_model.COUNTS.write_text(rows + "\n")
    cost_model.counts.cache_clear()
    replace_block(chips.PAGE, "chips", chips.block())
    replace_block(chips.TOKENS_PAGE, chips.TOKENS_COMMAND, chips.tokens_block())
    return [cost_model.COUNTS, chips.PAGE, chips.TOKENS_PAGE]


def print_(args: argparse.Namespace) -> None:
    if args.write:
        print(*write(), sep="\n")
    else:
        print(to_markdown(table()))

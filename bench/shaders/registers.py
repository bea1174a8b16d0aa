"""Registers of every shader: as many as ptxas takes without a limit, and what spills at 128.

An Apple GPU has 128 registers a lane. Nothing tells without a Mac how many a shader takes there;
ptxas, which allocates registers for the same text on an NVIDIA GPU, stands for Apple's compiler. It
schedules for latency: without a limit ptxas takes what it gets, so what counts is whether a kernel
fits. Sometimes ptxas starts so many loads at 128 that some registers spill, and the kernel fits at
less: then a lower limit is tried, for what fits in 112 fits in 128.

A division of floats is a call in ptxas, around which registers are saved; an Apple GPU divides in
line. It is counted as the division that NVIDIA GPUs do in line.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch_metalmm import _C, formats
from torch_metalmm.msl import ptx

from ..tables import Table, to_markdown

LIMIT, NO_LIMIT = 128, 255
TRIED = (LIMIT, 120, 112, 104, 96)
# What is planned for: enough that every rule of plan() takes each side.
SHAPES = ((4096, 4096), (14336, 4096), (1024, 4096), (512, 16384), (128256, 4096), (4096, 1024))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 512)
OPS = ("linear", "swiglu_up", "swiglu_down", "embedding", "dequantize")
DTYPES = ("f16", "bf16", "f32")

Pass = dict[str, Any]


@dataclass(frozen=True)
class Registers:
    """A kernel's registers without a limit, its bytes of spills with one of 128, and whether plan()
    chooses the kernel for an Apple chip."""

    kernel: str
    registers: int
    spilled: int
    is_chosen: bool


def codecs() -> dict[str, str]:
    """{codec: a format of it}: of an affine one that with groups of 64 and f16 scales."""
    out: dict[str, str] = {}
    for name in formats.names():
        codec = re.sub(r"_g\d+.*", "", name)
        if codec == name or name == f"{codec}_g64":
            out[codec] = name
    return out


def split(kernel: str) -> tuple[str, str, str]:
    """Strategy, codec ("" where there is none) and dtype of a kernel."""
    names = {s for op in _C.ops() for s in _C.strategies(op)}
    names |= {"attention_join", "arrange_x"}  # which nobody asks for
    strategy = max((s for s in names if kernel.startswith(s + "_")), key=len)
    codec, _, dtype = kernel[len(strategy) + 1 :].rpartition("_")
    return strategy, codec, dtype


def _plans(op: str, name: str, dtype: str) -> Iterable[Pass]:
    rows = ROWS if op == "linear" else [m for m in ROWS if _C.is_fused(op, m)] or [1]
    for chip in _C.gpus():
        for n, k in SHAPES:
            for m in rows:
                plan = _C.plan(op, m=m, n=n, k=k, format=name, dtype=dtype, chip=chip["name"])
                yield from plan["passes"]


def _plans_of_caches(name: str, dtype: str) -> Iterable[Pass]:
    """4 rows of q for a head of keys, and 160; heads of 128 values. None where no shader stores."""
    if f"rope_append_{name}_{dtype}" not in _C.kernel_names():
        return
    for queries in (1, 40):
        heads = {"heads": 32, "kv_heads": 8}
        asked = {"k": 128, "n": 8192, "format": name, "dtype": dtype, "chip": "m1"}
        yield from _C.plan("attention", **asked, attention=heads | {"queries": queries})["passes"]
        rope = heads | {"rotated": 128, "positions": queries, "angle_rows": queries}
        yield from _C.plan("rope_append", m=queries, **asked, rope=rope)["passes"]


def _plans_of_experts(name: str, dtype: str) -> Iterable[Pass]:
    """8 of 128 experts, of a token and of a prompt, in the tiles with most rows."""
    asked = {"n": 768, "k": 4096, "format": name, "dtype": dtype, "chip": "m1"}
    for op, m, choices in (("linear", 8, 1), ("up", 8, 1), ("down", 1, 8), ("tiles", 6400, 1)):
        sizes = {"experts": 128, "choices": choices, "sharing": 8, "tile_rows": 64, "is_oai": True}
        tiles = op == "tiles"
        bias = {"bias": not tiles, "y_f32": tiles}
        yield from _C.plan(f"expert_{op}", m=m, **asked, **bias, experts=sizes)["passes"]


def chosen() -> dict[str, Pass]:
    """{kernel that plan() chooses for a chip of the table: the pass with most rows of x}."""
    out: dict[str, Pass] = {}
    for name in codecs().values():
        for dtype in DTYPES:
            plans = (_plans(op, name, dtype) for op in OPS)
            others = (_plans_of_caches(name, dtype), _plans_of_experts(name, dtype))
            for one in chain(*plans, *others):
                best = out.setdefault(one["kernel"], one)
                if one["constants"]["batch"] > best["constants"]["batch"]:
                    out[one["kernel"]] = one
    return out


def forced(kernel: str) -> Pass | None:
    """A pass of a kernel that is only run by name; None where it has no format."""
    strategy, codec, dtype = split(kernel)
    if not codec:
        return None
    problem = {"m": 8, "n": 4096, "k": 4096, "format": codecs()[codec], "dtype": dtype}
    plan = _C.plan(strategy=strategy, chip="m1", **problem)
    return next(one for one in plan["passes"] if one["kernel"] == kernel)


def text_of(one: Pass, ptx_text: str) -> str:
    """The PTX of a pass, as the launcher fills it in but for the limit of registers."""
    values = [one["constants"][name] for name in _C.CONSTANTS] + [0]
    text = ptx_text.replace("MM_THREADS", str(one["group"][0]))
    text = text.replace("div.rn.f32", "div.full.f32")
    return re.sub(r"MM_CONSTANT_(\d+)", lambda m: str(values[int(m[1])]), text)


_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def _assemble(text: str, limit: int) -> tuple[int, int]:
    """Registers and bytes of spills. OSError: no ptxas. RuntimeError: what it says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.ptx"
        file.write_text(text.replace("MM_REGISTERS", str(limit)))
        command = ["ptxas", "-v", "-arch=sm_90", str(file), "-o", str(file.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    used, spills = _USED.search(done.stderr), _SPILLS.search(done.stderr)
    if done.returncode or not used or not spills:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")
    return int(used[1]), max(int(spills[1]), int(spills[2]))


def measure(kernel: str, one: Pass, is_chosen: bool, ptx_text: str) -> Registers:
    """What ptxas says of a kernel."""
    text = text_of(one, ptx_text)
    registers, spilled = _assemble(text, NO_LIMIT)
    if registers > LIMIT:
        spilled = _assemble(text, LIMIT)[1]
        for limit in TRIED[1:]:
            if not spilled:
                break
            spilled = min(spilled, _assemble(text, limit)[1])
    return Registers(kernel, registers, spilled, is_chosen)


def passes() -> dict[str, tuple[Pass, bool]]:
    """{kernel with a format: a pass of it, whether it is chosen}."""
    found = chosen()
    out = {}
    for kernel in _C.kernel_names():
        one = found.get(kernel) or forced(kernel)
        if one and split(kernel)[1]:
            out[kernel] = (one, kernel in found)
    return out


def all_registers(folder: Path = ptx.FOLDER) -> list[Registers]:
    """The registers of every kernel with a format. OSError: ptxas is not installed."""
    if not shutil.which("ptxas"):
        raise OSError("ptxas: not found; it is in the CUDA toolkit and in nvidia-cuda-nvcc wheels")
    ptx.build(folder)

    def job(item: tuple[str, tuple[Pass, bool]]) -> Registers:
        kernel, (one, is_chosen) = item
        return measure(kernel, one, is_chosen, (folder / f"{kernel}.ptx").read_text())

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(job, passes().items()))


def cell(found: Registers) -> str:
    """ "96", or "153" without a limit where that fits in 128, or "153 (48 B)" where it spills."""
    mark = "" if found.is_chosen else "*"
    return f"{found.registers}{mark}" + (f" ({found.spilled} B)" if found.spilled else "")


def tables(found: Iterable[Registers]) -> list[Table]:
    """A table for each dtype of x: a row per codec, a column per strategy."""
    cells = {one.kernel: cell(one) for one in found}
    columns = list(dict.fromkeys(split(kernel)[0] for kernel in cells))
    out = []
    for dtype in DTYPES:
        rows = [
            [codec, *(cells.get(f"{s}_{codec}_{dtype}", "") for s in columns)] for codec in codecs()
        ]
        out.append(Table(f"Registers without a limit, x {dtype}", ["format", *columns], rows))
    return out


def print_(args: argparse.Namespace) -> None:
    print(*map(to_markdown, tables(all_registers())), sep="\n\n")

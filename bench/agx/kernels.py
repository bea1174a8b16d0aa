"""`python -m bench agx`: the shaders as code of Apple's G13 and G14 GPUs (M1, M2), by Mesa.

torch_metalmm.msl.spirv makes SPIR-V of a kernel with the constants of the pass that plan() makes of
it, mmagx makes code of that, code.py counts. Instructions and operands are the machine's own; the
registers and the order are Mesa's choice, not Apple's. A product of simdgroup matrices is two
multiply-adds here, for Mesa has no simd_matrix, and the threads of a core are those of Mesa's
table. bf16 is left out: Mesa 25.0 reads no bfloat.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch_metalmm import _C
from torch_metalmm.msl import spirv
from torch_metalmm.msl.build import BuildError

from ..shaders import cells, passes
from ..tables import Table
from .build_mesa import PROGRAM
from .code import CLASSES, Code, read

# Where none is named: gemv of every format, then other kernels of a few.
SHOWN = (
    "gemv_*_f16",
    *(f"gemv_*_{f}_f16" for f in ("q4_0", "q8_0", "q4_k", "affine4")),
    "gemv_batched_q6_k_f16",
    *(f"swiglu_*_{f}_f16" for f in ("q4_0", "q4_k")),
    *(f"gemm*_{f}_f16" for f in ("q4_0", "q8_0", "q4_k", "q6_k", "affine4")),
    *(f"attention_*_{f}_f16" for f in ("f16", "q8_0", "q4_0")),
    *(f"{op}_f16" for op in ("rms_norm", "add_rms_norm", "rope", "act_mul", "attention_join")),
    *("causal_conv_f16", "gated_delta_f16", "ssm_scan_f16", "route_f16", "rope_append_q8_0_f16"),
)
_SIZES: dict[str, dict[str, Any]] = {
    "causal_conv": {"n": 8192, "k": 4, "conv": {"width": 4}},
    "gated_delta": {"n": 4096, "k": 128},  # heads of 128
    "ssm_scan": {"n": 64, "k": 128},
    "route": {"n": 128, "k": 8},  # 8 of 128 experts
}


class Found(NamedTuple):
    """A kernel, weights of a lane in a turn of its loop (0: not known), its code or why none."""

    name: str
    weights: int
    code: Code | str


@functools.cache
def _passes() -> dict[str, passes.Pass]:
    """{kernel: a pass of it}."""
    out = passes.passes()
    for op in _C.ops():
        for dtype in passes.DTYPES if f"{op}_f16" in _C.kernel_names() else ():
            sizes = _SIZES.get(op, {"n": 4096, "k": 4096})
            plan = _C.plan(op, m=1, **sizes, format="f16", dtype=dtype, chip="m1")
            out |= {one["kernel"]: one for one in plan["passes"]}
    return out


def pass_of(kernel: str) -> passes.Pass:
    """The pass that a kernel is compiled for: of plan(), or of the first kernel of its file that
    has one, or without constants."""
    plain = {"constants": dict.fromkeys(_C.CONSTANTS, 0) | {"k": 4096}, "group": [128]}
    return _passes().get(kernel, plain | {"threadgroup_bytes": 1024})


@functools.cache
def weights() -> dict[str, int]:
    """{STRATEGY_FORMAT: weights that a lane takes in a turn of its main loop}."""
    lines = ["#include <metal_stdlib>", '#include "entry.h"', '#include "formats/all.h"']
    headers = {header for header, *_ in cells.STRATEGIES.values()}
    lines += [f'#include "kernels/{header}.h"' for header in sorted(headers)]
    lines.append("#define MM_FORMAT(name, Struct) \\")
    for strategy, (_, _, rows, _) in cells.STRATEGIES.items():
        of_rows = rows.replace("metalmm::Struct", "Struct")
        lines.append(
            f'  extern "C" __attribute__((used)) constant uint weights_{strategy}_##name = '
            "Struct::Pieces::kValues * " + of_rows + "; \\"
        )
    lines += ["", "using namespace metalmm;", '#include "formats/each.h"', ""]
    found = cells.clang("\n".join(lines), *cells.TEXT, *cells.FLAGS)
    return {m[1]: int(m[2]) for m in re.finditer(r"@weights_(\w+) = .*i32 (\d+)", found)}


def compile_kernel(kernel: str, metal: Path = spirv.METAL) -> Code:
    """compile_pass() of the pass that it is compiled for."""
    return compile_pass(pass_of(kernel) | {"kernel": kernel}, metal)


def compile_pass(one: passes.Pass, metal: Path = spirv.METAL) -> Code:
    """The code of a kernel: what does not change in a loop moved out of it, as LLVM does, unless
    registers spill for that. OSError: mmagx is not built. RuntimeError: a compiler's message.
    """
    if not PROGRAM.exists():
        raise OSError(f"{PROGRAM}: not there; make agx builds it")
    module = spirv.build(one["kernel"], one["constants"], one["threadgroup_bytes"], metal)
    return compile_module(one["kernel"], module, one["group"][0])


def compile_module(name: str, module: bytes, threads: int, *, fuse: bool = False) -> Code:
    """The code of a SPIR-V module, as compile_pass(). fuse: product and sum are one instruction."""
    hoisted = _code(name, module, threads, hoist=True, fuse=fuse)
    if not hoisted.spills:
        return hoisted
    kept = _code(name, module, threads, hoist=False, fuse=fuse)
    return min(hoisted, kept, key=lambda code: code.spills)


def _code(kernel: str, module: bytes, threads: int, *, hoist: bool, fuse: bool) -> Code:
    """The code that mmagx makes of a module of SPIR-V. RuntimeError: the message of mmagx."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.spv"
        file.write_bytes(module)
        command = [
            str(PROGRAM),
            str(file),
            spirv.ENTRY,
            str(threads),
            str(int(hoist)),
            str(int(fuse)),
        ]
        environment = os.environ | {"AGX_MESA_DEBUG": "shaders,shaderdb"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "bytes into the SPIR-V" not in line]
        raise RuntimeError(f"{kernel}: mmagx: {' '.join(said)[-300:].strip()}")
    return read(done.stdout + done.stderr)


def each(job: Callable[[Any], Code], of: Iterable[Any]) -> list[Code | str]:
    """The code that the job makes of each item, or a compiler's message."""

    def one(item: Any) -> Code | str:
        try:
            return job(item)
        except (BuildError, RuntimeError, ValueError) as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, of))


def measure(names: Sequence[str], metal: Path = spirv.METAL) -> list[Found]:
    """Kernels, with the weights that a lane takes in a turn, where they are known."""
    codes = each(lambda kernel: compile_kernel(kernel, metal), names)
    turns = [weights().get(name.rpartition("_")[0], 0) for name in names]
    return [Found(*one) for one in zip(names, turns, codes, strict=True)]


def table(found: Iterable[Found]) -> Table:
    """A row for each kernel: of its main loop per weight, or of one turn where the weights of a
    turn are not known, and what the whole kernel takes."""
    counts = ["instructions", "slots", "other pipe", "64-bit", "cycles", *CLASSES]
    columns = ["kernel", "weights", *counts, "half registers", "threads", "spills", "bytes"]
    rows = []
    for kernel, n, code in found:
        if isinstance(code, str):
            rows.append([kernel, code.splitlines()[-1][:80], *[""] * (len(columns) - 2)])
            continue
        of_loop = [len(code.loop), code.slots, code.other_pipe, code.wide, code.cycles]
        of_loop += [code.counts[kind] for kind in CLASSES]
        shown = [f"{count / n:.2f}" if n else str(count) for count in of_loop]
        shown = ["" if not float(text) else text for text in shown]
        whole = [code.half_registers, code.threads, code.spills, code.threadgroup_bytes]
        rows.append([kernel, str(n or "a turn"), *shown, *map(str, whole)])
    title = "Code of M1 and M2: the main loop per weight, and the kernel"
    used = [i for i, name in enumerate(columns) if name not in CLASSES or any(r[i] for r in rows)]
    return Table(title, [columns[i] for i in used], [[row[i] for i in used] for row in rows])


def named(patterns: Sequence[str]) -> list[str]:
    """The kernels of patterns, in their order. ValueError: a pattern that none matches."""
    out: list[str] = []
    for pattern in patterns:
        names = [name for name in _C.kernel_names() if fnmatch.fnmatchcase(name, pattern)]
        # gemv_*_f16 is gemv of every format, not gemv_batched; Mesa reads no weights in bf16.
        if pattern.count("_") == 2 and "*" in pattern:
            strategy = pattern.partition("_*_")[0]
            names = [name for name in names if passes.split(name)[0] == strategy] or names
            names = [name for name in names if "bf16" not in name]
        if not names:
            raise ValueError(f"{pattern}: no kernel has such a name")
        out += names
    return list(dict.fromkeys(out))

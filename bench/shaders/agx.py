"""`python -m bench agx`: the shaders as code of Apple's G13 and G14 GPUs (M1, M2), by Mesa; the
vector kernels of ggml and MLX, too, and with --rows what several rows of x cost.

torch_metalmm.msl.spirv makes SPIR-V of a kernel with the constants of the pass that plan() makes of
it, mmagx makes code of that, agx_code.py counts. Instructions and operands are the machine's own;
the registers and the order are Mesa's choice, not Apple's. A product of simdgroup matrices is two
multiply-adds here, for Mesa has no simd_matrix, and the threads of a core are those of Mesa's
table. bf16 is left out: Mesa 25.0 reads no bfloat.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch_metalmm import _C
from torch_metalmm.msl import spirv
from torch_metalmm.msl.build import BuildError
from torch_metalmm.msl.source import Kernel

from ..tables import Table, to_markdown
from . import cells, foreign, passes
from .agx_code import CLASSES, Code, read
from .build_mesa import PROGRAM

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


# ---- ggml's and MLX's, from the text of their files
#
# Translated as for the emulator, made SPIR-V as ours are and counted by the same compiler, with the
# values of the way without checks for their function constants. Loops of a constant length unroll
# whatever their size. A product and a sum are one instruction, which their fast math allows.

# Weights that a lane takes in a turn of its loop. ggml, x f32: rows of W (N_R0 of
# ggml-metal-impl.h) times values. MLX, x f16: 4 rows times values.
GGML = {
    "q4_0": 4 * 16, "q4_1": 4 * 16, "q5_0": 4 * 16, "q5_1": 4 * 16, "q8_0": 2 * 8, "q2_K": 4 * 32,
    "q3_K": 2 * 32, "q4_K": 2 * 32, "q5_K": 32, "q6_K": 2 * 16,
}  # fmt: skip
MLX = {"half, 64, 2": 4 * 16, "half, 64, 4": 4 * 16, "half, 64, 8": 4 * 8}
_THREADS, _THREADGROUP_BYTES = 64, 8192
_OPTIONS = ["-ffp-contract=fast", *foreign.UNROLL]


def codes(text: foreign.Text, names: list[str]) -> Iterator[tuple[str, Code | str]]:
    """Kernels by name. ValueError: the text has no such kernel, or is not Metal."""
    translated, wanted = text.translated(names)
    body = foreign.text_of(translated)

    def job(kernel: Kernel) -> Code:
        module = spirv.compile_kernel(body, kernel, {}, _THREADGROUP_BYTES, _OPTIONS)
        return compile_module(kernel.name, module, _THREADS, fuse=True)

    return zip([k.name for k in wanted], each(job, wanted), strict=True)


def of_ggml(file: Path) -> Iterator[Found]:
    """kernel_mul_mv of mul_mv.metal. ValueError: another file. OSError: no such file."""
    names = {f"kernel_mul_mv_{f}_f32": n for f, n in GGML.items()}
    for name, code in codes(foreign.ggml(file), list(names)):
        yield Found(f"ggml {name}", names[name], code)


def of_mlx(folder: Path) -> Iterator[Found]:
    """affine_qmv_fast of MLX's include folder. ValueError: another folder."""
    text = foreign.mlx(folder, [f"affine_qmv_fast<{a}, false>" for a in MLX])
    names = {f"mlx_{i}": a for i, a in enumerate(MLX)}
    for name, code in codes(text, list(names)):
        yield Found(f"MLX qmv_fast {names[name]}", MLX[names[name]], code)


# ---- several rows of x: the vector kernels and the tile
#
# A kernel is compiled for the pass that plan() makes of so many rows. A weight that it decodes in
# several passes over M costs as often; that of a tile costs the same for 8 rows of x whatever there
# are. A product of two 8 x 8 matrices, two multiply-adds in Mesa's code, takes 16 slots
# (docs/chip-model.md).

FORMATS = ("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4")  # a pass has up to 8 rows of x
FORMATS += ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "affine4", "affine8")  # up to 4
ROWS_SHOWN = (2, 4, 8)
MOST = 16
# gemm_small: weights that a lane decodes for 32 products; slots of a product in Mesa's code, and
# its cycles: 512 multiply-adds of 32 lanes at the rate of the vector units.
_TILE_WEIGHTS, _TILE_PRODUCTS, _COUNTED_SLOTS, _PRODUCT_CYCLES = 64, 32, 2, 16


class Cost(NamedTuple):
    """Cost of a weight, for all rows of x."""

    instructions: float
    cycles: float


def _pass_of_rows(strategy: str, codec: str, m: int) -> passes.Pass:
    asked = {"m": m, "n": 4096, "k": 4096, "format": passes.codecs()[codec], "dtype": "f16"}
    plan = _C.plan(strategy=strategy, chip="m1-max", **asked)
    return next(one for one in plan["passes"] if one["kernel"].startswith(strategy))


@functools.cache
def _code_of_rows(strategy: str, codec: str, batch: int) -> Code:
    """The machine code of a pass of so many rows of x."""
    return compile_pass(_pass_of_rows(strategy, codec, max(batch, 1)))


def vector(codec: str, m: int) -> Cost:
    """gemv of one row, gemv_batched of more."""
    strategy = "gemv" if m == 1 else "gemv_batched"
    one = _pass_of_rows(strategy, codec, m)
    batch = one["constants"]["batch"]
    code, times = _code_of_rows(strategy, codec, batch), one["grid"][0]
    # Beside rows of x that are kept a turn has as many rows of W as one of gemv.
    turn = "gemv" if batch <= _C.KEPT_ROWS else strategy
    each = times / weights()[f"{turn}_{codec}"]
    return Cost(len(code.loop) * each, code.cycles * each)


def tile(codec: str, m: int) -> Cost:
    """gemm_small, without the pass that may arrange x."""
    one = _pass_of_rows("gemm_small", codec, m)
    code, times = _code_of_rows("gemm_small", codec, one["constants"]["batch"]), one["grid"][0]
    products = _TILE_PRODUCTS * one["constants"]["batch"] // 8
    cycles = code.cycles + products * (_PRODUCT_CYCLES - _COUNTED_SLOTS)
    loop = len(code.loop) - products * (_COUNTED_SLOTS - 1)
    return Cost(loop * times / _TILE_WEIGHTS, cycles * times / _TILE_WEIGHTS)


def threshold(vectors: Sequence[float], tiled: Sequence[float]) -> int:
    """So many rows that the vector kernel up to there and the tile beyond cost least in all, each M
    from 1 on as one."""
    best = [min(pair) for pair in zip(vectors, tiled, strict=True)]
    taken = (vectors[:m] + tiled[m:] for m in range(len(best) + 1))
    sums = [sum(t / b for t, b in zip(one, best, strict=True)) for one in taken]
    return sums.index(min(sums))


def planned(codec: str) -> int:
    """Up to how many rows plan() takes the vector kernels of an M1."""
    asked = {"n": 4096, "k": 4096, "format": passes.codecs()[codec], "dtype": "f16", "chip": "m1"}
    kernels_of = {
        m: [one["kernel"] for one in _C.plan(m=m, **asked)["passes"]] for m in range(1, MOST + 1)
    }
    return max(m for m, names in kernels_of.items() if any("gemv" in name for name in names))


def rows_table() -> Table:
    """A row for each format. RuntimeError, BuildError: a compiler's message."""
    each = [(f, m) for f in FORMATS for m in range(1, MOST + 1)]
    vectors = {(f, m): vector(f, m) for f, m in each}
    tiled = {(f, m): tile(f, m) for f, m in each}
    rows = []
    for f in FORMATS:
        one = vectors[f, 1]
        ratios = [vectors[f, m].instructions / one.instructions for m in ROWS_SHOWN]
        cycles = [f"{vectors[f, m].cycles:.2f}" for m in (1, *ROWS_SHOWN, MOST)]
        least = threshold(
            [vectors[f, m].cycles for m in range(1, MOST + 1)],
            [tiled[f, m].cycles for m in range(1, MOST + 1)],
        )
        shown = [f"{r:.2f}" for r in ratios]
        of_tile = [f"{tiled[f, m].cycles:.2f}" for m in (8, MOST)]
        rows.append(
            [f, f"{one.instructions:.2f}", *shown, *cycles, *of_tile, str(least), str(planned(f))]
        )
    columns = ["W", "instructions, M = 1", *(f"M = {m}, of that" for m in ROWS_SHOWN)]
    columns += [f"cycles, M = {m}" for m in (1, *ROWS_SHOWN, MOST)]
    columns += [f"tile, {m} rows" for m in (8, MOST)] + ["vector up to M", "plan()"]
    return Table("Several rows of x, f16: a weight", columns, rows)


def print_(args: argparse.Namespace) -> None:
    """A row for each kernel, ours and other projects', or what several rows of x cost."""
    if args.rows:
        print(to_markdown(rows_table()))
        return
    names = named(args.kernels or SHOWN)
    found = measure(names, args.metal or spirv.METAL)
    found += [*(of_ggml(args.ggml) if args.ggml else ())]
    found += [*(of_mlx(args.mlx) if args.mlx else ())]
    print(to_markdown(table(found)))

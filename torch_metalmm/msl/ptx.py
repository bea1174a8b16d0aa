"""Compiles the shaders of metal/ to PTX, for the CUDA engine: `python -m torch_metalmm.msl.ptx`.

One file per kernel, in torch_metalmm/ptx/. PTX has no function constants: each is a token,
MM_CONSTANT_i, that the launcher replaces by its value before the driver compiles the text, so that
the driver removes branches and unrolls loops as Metal does.

Compiling needs a source checkout and the ziglang package. A wheel has the files if METALMM_PTX=1
asks for them when the wheel is built.
"""

from __future__ import annotations

import fcntl
import functools
import re
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .build import INCLUDE, JOBS, LANGUAGE, BuildError, compiled, digest, preprocess
from .kernels import METAL, Shader
from .markers import unmark
from .source import Kernel, Reader, Source

FOLDER = Path(__file__).parents[1] / "ptx"

# sm_80 is the first with conversions to bfloat; the driver compiles for the GPU that it finds.
_TARGET = ["-target", "nvptx64-nvidia-cuda", "-Xclang", "-target-cpu", "-Xclang", "sm_80"]
_CODE = ["-O3", "-S", "-ffp-contract=off", "-fconvergent-functions", "-w"]
# Strength reduction gives each row of W a pointer of its own, which takes registers and additions;
# without it ptxas folds the distance of rows into the loads (gemv q4_0: 4.7 to 4.2 instructions a
# weight, 80 to 59 registers).
_CODE += ["-mllvm", "-disable-lsr"]
_CODE += ["-DMM_CONVERTS_HALVES"]  # codes as subnormal halves would cost an instruction each
_CODE += ["-DMM_ONE_ADDRESS"]  # of the parts of a block: metal/formats/blocks.h
_CODE += ["-DMM_ALL_ROWS_AT_ONCE"]  # loads of a step: metal/kernels/gemv_core.h
_MATRIX = re.compile(r"\bsimdgroup_(float|half|bfloat)8x8\b|\bsimdgroup_matrix\b")
_POSITIONS = {
    "threadgroup_position_in_grid": "threadgroup_position_in_grid(operands)",
    "thread_index_in_threadgroup": "thread_index_in_threadgroup()",
    "simdgroup_index_in_threadgroup": "simdgroup_index_in_threadgroup()",
    "thread_index_in_simdgroup": "lane()",
}


def _argument(kernel: Kernel, role: str, index: str) -> str:
    if role == "buffer":
        return f"::metal::warp::buffer<({index})>(operands, arguments)"
    if role == "threadgroup":
        return "mm_threadgroup_memory"
    if role not in _POSITIONS:
        raise BuildError(f"{kernel.name}: [[{role}]] has no counterpart in PTX")
    return f"::metal::warp::{_POSITIONS[role]}"


def _entries(source: Source) -> str:
    """C++: an entry for each kernel, and the numbers of the function constants."""
    parameters = "::metal::warp::Operands operands, ::metalmm::KernelArgs arguments"
    out = ['#include "nvptx/entry.h"\n']
    for i, k in enumerate(source.kernels):
        arguments = ", ".join(_argument(k, role, index) for role, index in k.arguments)
        head = f"void mm_entry{i}({parameters})"
        out.append(
            f'extern "C" __attribute__((device_kernel)) {head} __asm__("{k.name}");\n'
            f'extern "C" {head} {{ {k.expression}({arguments}); }}\n'
        )
    for c in source.constants:
        value = f"static_cast<uint>({c.namespace}::{c.index})"
        out.append(
            f'extern "C" __attribute__((used)) constant uint mm_index_{c.index} = {value};\n'
        )
    return "".join(out)


def _compile(text: str, expanded: str, source: Source) -> str:
    """The PTX of a text, which includes a shader or is one."""
    lanes = ["-DMM_MATRIX_LANES"] if _MATRIX.search(expanded) else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shader.cpp"
        file.write_text(text + _entries(source))
        return compiled("clang", *LANGUAGE, *_TARGET, *_CODE, *lanes, file, "-o", "-")


# Where a kernel has no limit of registers, ptxas works towards 64 and pays with loads that wait for
# one another and with spills; the launcher sets one that leaves a multiprocessor 12 warps or more.
_LIMITS = ".reqntid MM_THREADS, 1, 1\n.maxnreg MM_REGISTERS"

_HEAD = re.compile(r"^\.(?:version|target|address_size)[^\n]*\n", re.MULTILINE)
_VARIABLE = re.compile(r"^\.[^\n(]*? (\w+)(?:\[[^\n=]*\])*(?: =[^\n]*)?;\n", re.MULTILINE)
_INDEX = re.compile(r"\bmm_index_(\w+)(?: = (\d+))?;")
_ENTRY_OF = re.compile(r"^\.visible \.entry (\w+)\(.*?^\}\n", re.MULTILINE | re.DOTALL)
_LOAD = re.compile(r"\bld\.global\.b(\d+) *\t?(%r[sd]?)(\d+), \[mm_fc_(\w+)(?:\+(\d+))?\];")
_BITS = {"%rs": 16, "%r": 32, "%rd": 64}  # of a register


def split(ptx: str) -> dict[str, str]:
    """{kernel: its own module} of the PTX of a file, with tokens for what the launcher fills in."""
    head = "".join(_HEAD.findall(ptx))
    variables = {m[1]: m[0] for m in _VARIABLE.finditer(ptx)}
    numbers = {name: int(value or 0) for name, value in _INDEX.findall(ptx)}
    numbers["linear_grid"] = 1 + max(numbers.values())

    def token(m: re.Match[str]) -> str:
        value = f"MM_CONSTANT_{numbers[m[4]]}"
        if m[5]:  # from a byte of it
            value = f"({value}) >> {8 * int(m[5])}"
        if int(m[1]) < 32:  # part of a constant of 32 bits
            value = f"({value}) & {(1 << int(m[1])) - 1}"
        return f"mov.b{_BITS[m[2]]} {m[2]}{m[3]}, {value};"

    modules = {}
    for m in _ENTRY_OF.finditer(ptx):
        body = _LOAD.sub(token, m[0]).replace("\n{", f"\n{_LIMITS}\n{{", 1)
        if "mm_fc_" in body:
            raise BuildError(f"{m[1]}: a use of a function constant that is no load of it")
        used = set(re.findall(r"\w+", body)) & variables.keys()
        modules[m[1]] = head + "".join(variables[v] for v in sorted(used)) + body
    return modules


def _build(shader: Shader, folder: Path) -> list[str]:
    """Writes the kernels of one shader, unless they are there; their names."""
    text = shader.text
    expanded = preprocess(text, shader.file.name, [])
    key = digest(expanded, _tools())
    stamp = folder / f"{shader.name}.stamp"
    with (folder / f"{shader.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = stamp.read_text().split() if stamp.exists() else []
        if before[:1] == [key]:
            return before[1:]
        source = Reader(unmark(expanded, shader.file.name)[0]).read()
        names = [k.name for k in source.kernels]
        modules = split(_compile(text, expanded, source))
        for name in names:
            (folder / f"{name}.ptx").write_text(modules[name])
        stamp.write_text("\n".join([key, *names]))
    return names


@functools.cache
def _tools() -> str:
    """What makes PTX of a text: options, headers, this file, the compiler."""
    headers = sorted(p for p in INCLUDE.rglob("*") if p.is_file())
    return digest(*_TARGET, *_CODE, *headers, Path(__file__), compiled("version"))


def build(folder: Path = FOLDER, shaders: Iterable[Shader] = ()) -> list[str]:
    """Compiles what is not in `folder` yet, of all shaders or of these; the names of the kernels.

    BuildError: what the compiler says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = [Shader(f) for f in sorted(METAL.rglob("*.metal"))]
    with ThreadPoolExecutor(JOBS) as pool:
        parts = list(pool.map(lambda s: _build(s, folder), shaders or every))
    return [name for part in parts for name in part]


if __name__ == "__main__":
    print(f"{len(build())} kernels in {FOLDER}")
    sys.exit(0)

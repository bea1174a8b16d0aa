"""Compiles a shader of metal/ to SPIR-V: `python -m torch_metalmm.msl.spirv KERNEL FILE [k=4096]`.

SPIR-V is what drivers' compilers read that are no NVIDIA's: Mesa's makes code of Apple GPUs from it
(bench/shaders/agx.py). A file is one kernel as OpenCL has them, whose buffers are its parameters in
the order of the text, with values for the function constants and for the bytes of threadgroup
memory.
Nothing runs these files: a product of simdgroup matrices is only counted
(csrc/msl/spirv/simdgroup_matrix.h).
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import _C
from .build import LANGUAGE, BuildError, compiled, preprocess
from .kernels import METAL, alone
from .markers import unmark
from .source import Kernel, Reader

ENTRY = "mm_entry"  # the name of the kernel in the file
_TARGET = ["-target", "spirv64"]
_CODE = ["-O3", "-ffp-contract=off", "-fconvergent-functions", "-fno-math-errno", "-w"]
# Mesa has no vectors of more than 16 bytes. The loop along K is not unrolled, so that a turn of it
# is one piece of each row; loops that the text unrolls are. Strength reduction: as in ptx.py.
_CODE += ["-fno-vectorize", "-fno-slp-vectorize"]
for _option in ("unroll-allow-partial=0", "unroll-runtime=0", "disable-lsr"):
    _CODE += ["-mllvm", f"-{_option}"]
_MAGIC = 0x07230203
_CONSTANT = re.compile(r"^@mm_fc_kConstant(\w+) = .*$", re.M)


def with_constants(ir: str, values: Mapping[str, int]) -> str:
    """LLVM's text with values for the function constants, by their names in _C.CONSTANTS."""
    value = {name.replace("_", ""): number for name, number in values.items()}
    return _CONSTANT.sub(
        lambda m: f"@mm_fc_kConstant{m[1]} = internal constant i32 {value[m[1].lower()]}", ir
    )


def _entry(kernel: Kernel, threadgroup_bytes: int) -> str:
    """C++: the OpenCL kernel that calls `kernel`."""
    parameters, arguments = [], []
    function = f"decltype({kernel.expression})"
    for i, (role, _) in enumerate(kernel.arguments):
        if role == "buffer":
            parameter = f"::metal::warp::NthParameter<{i}, {function}>"
            parameters.append(f"{parameter}::type a{i}")
            arguments.append(f"{parameter}::pass(a{i})")
        elif role == "threadgroup":
            arguments.append(f"(::metal::warp::NthParameter<{i}, {function}>::type)(mm_memory)")
        elif role == "thread_index_in_simdgroup":
            arguments.append("::metal::warp::lane()")
        else:
            arguments.append(f"::metal::warp::{role}()")
    size = max(threadgroup_bytes, 16) // 16
    return (
        '#include "spirv/entry.h"\n'
        f"static threadgroup float4 mm_memory[{size}] __attribute__((loader_uninitialized));\n"
        f'extern "C" __attribute__((device_kernel)) void {ENTRY}({", ".join(parameters)}) '
        f"{{ {kernel.expression}({', '.join(arguments)}); }}\n"
    )


def compile_kernel(
    text: str,
    kernel: Kernel,
    constants: Mapping[str, int],
    threadgroup_bytes: int,
    options: Sequence[str] = (),
) -> bytes:
    """The SPIR-V of a kernel of a text. BuildError: what the compiler says."""
    with tempfile.TemporaryDirectory() as folder:
        source, ir, made = (Path(folder) / name for name in ("a.cpp", "a.ll", "a.spv"))
        source.write_text(f"{text}{_entry(kernel, threadgroup_bytes)}")
        # A pipeline gives values to constants of code that is optimised without them.
        options = [*_TARGET, *_CODE, *options]
        compiled("clang", *LANGUAGE, *options, "-emit-llvm", "-S", source, "-o", ir)
        ir.write_text(with_constants(ir.read_text(), constants))
        compiled("clang", "-x", "ir", *options, "-c", ir, "-o", made)
        module = made.read_bytes()
    if kernels_of(module) != [ENTRY]:
        raise BuildError(f"{kernel.name}: the SPIR-V has the kernels {kernels_of(module)}")
    return module


def build(
    kernel: str, constants: Mapping[str, int], threadgroup_bytes: int, metal: Path = METAL
) -> bytes:
    """The SPIR-V of a kernel of metal/, or of another folder with the same files.

    constants: the function constants by name, as a pass of plan() has them.

    ValueError: there is no such kernel, or a constant is missing. BuildError: what the compiler
    says.
    """
    if missing := [name for name in _C.CONSTANTS if name not in constants]:
        raise ValueError(f"constants: no value for {', '.join(missing)}")
    text = alone(kernel, metal).text
    expanded = preprocess(text, "kernel.metal", [])
    found = Reader(unmark(expanded, "kernel.metal")[0]).read().kernels
    if kernel not in (names := [k.name for k in found]):
        raise ValueError(f"kernel {kernel!r}: its file has {', '.join(names)}")
    return compile_kernel(text, found[names.index(kernel)], constants, threadgroup_bytes)


def kernels_of(module: bytes) -> list[str]:
    """The kernels of a SPIR-V module. ValueError: it is none.

    The header and the length of every instruction are read; spirv-val knows the rest.
    """
    if len(module) < 20 or len(module) % 4:
        raise ValueError(f"{len(module)} bytes are no SPIR-V module")
    words = struct.unpack(f"<{len(module) // 4}I", module)
    if words[0] != _MAGIC or not words[3]:
        raise ValueError(f"not SPIR-V: magic {words[0]:#x}, bound {words[3]}")
    names, at = [], 5
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if not 0 < length <= len(words) - at:
            raise ValueError(f"word {at}: an instruction of {length} words")
        if opcode == 15:  # OpEntryPoint: model, function, name
            name = struct.pack(f"<{length - 3}I", *words[at + 3 : at + length])
            names.append(name.partition(b"\0")[0].decode())
        at += length
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description="The SPIR-V of a kernel.")
    parser.add_argument("kernel")
    parser.add_argument("file", type=Path)
    parser.add_argument("constants", nargs="*", metavar="NAME=VALUE", help=", ".join(_C.CONSTANTS))
    parser.add_argument("--memory", type=int, default=0, help="bytes of threadgroup memory")
    a = parser.parse_args()
    given = {name: int(value) for name, _, value in (c.partition("=") for c in a.constants)}
    values = dict.fromkeys(_C.CONSTANTS, 0) | {"k": 4096} | given
    a.file.write_bytes(build(a.kernel, values, a.memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())

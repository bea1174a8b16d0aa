"""The C++ around a shader that tells the emulator what is in it: csrc/msl/host/abi.h."""

from __future__ import annotations

from collections.abc import Sequence

from .source import ROLES, TABLES, Constant, Source


def headers(translated: bool) -> str:
    """The headers that every text begins with."""
    return ("#define MM_TRANSLATED 1\n" if translated else "") + "#include <metal_stdlib>\n"


def prefix(constants: Sequence[Constant], translated: bool) -> str:
    """The code before a text: the headers, the storage of its function constants."""
    symbols = sorted({c.symbol for c in constants})
    storage = "".join(
        f"__attribute__((weak)) alignas(32) unsigned char {s}[32];\n" for s in symbols
    )
    return f'{headers(translated)}extern "C" {{\n{storage}}}\n'


def tables(source: Source, checked: bool) -> str:
    """The code behind a text: kernels, the roles of their arguments, function constants."""
    kernels, constants, arguments = [], [], []
    for i, k in enumerate(source.kernels):
        const = "::metal::emulator::is_read_only"
        rows = ", ".join(
            f"{{{ROLES[role]}, ({index}), {const}<{at}>(&{k.expression})}}"
            for at, (role, index) in enumerate(k.arguments)
        )
        arguments.append(
            f"static const MmArgument mm_a{i}[] = {{{rows or '{}'}}};\n"
            f"static void mm_run{i}() {{ ::metal::emulator::call(&{k.expression}, mm_a{i}); }}\n"
        )
        kernels.append(f'{{"{k.name}", mm_run{i}, {len(k.arguments)}, mm_a{i}}},\n')
    for i, c in enumerate(source.constants):
        inner = f"constexpr uint mm_index{i} = static_cast<uint>({c.index});"
        spaces = [s for s in c.namespace.split("::") if s]
        arguments.append("".join(f"namespace {s} {{" for s in spaces) + inner + "}" * len(spaces))
        path = f"{c.namespace}::{c.name}"
        kind = f"decltype(::metal::emulator::value_of({path}))"
        constants.append(
            f'{{"{c.name}", {c.namespace}::mm_index{i}, '
            f"::metal::emulator::constant_kind<{kind}>(), sizeof({path}), "
            f"::metal::emulator::constant_count<{kind}>(), {c.symbol}}},\n"
        )
    head = f'#line 1 "{TABLES}"\n#include "host/entry.h"\n' + "\n".join(arguments)
    visible = '\nextern "C" __attribute__((visibility("default"), used)) extern const'
    number = f"{visible} uint "
    return (
        f"{head}{visible} MmKernelEntry mm_kernels[] = {{\n{''.join(kernels)}{{}}}};"
        f"{number}mm_n_kernels = {len(kernels)};"
        f"{visible} MmConstantEntry mm_constants[] = {{\n{''.join(constants)}{{}}}};"
        f"{number}mm_n_constants = {len(constants)};{number}mm_checked = {int(checked)};\n"
    )

"""Writes the names of what metal/abi.h numbers as rows of macros, for plan.cpp.

    python csrc/python/abi_names.py metal/abi.h build/abi_names.def

kBoundsAlignedX = 8 of BoundsBits is MM_BIT("aligned_x", 8) of MM_BITS("BOUNDS_BITS", ...).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def numbered(text: str, enum: str, prefix: str) -> list[tuple[str, str]]:
    """(name, number) of the enumerators that are given one."""
    (body,) = re.findall(rf"enum {enum} : MM_U32 {{(.*?)}};", text, re.S)
    found = re.findall(rf"\b{prefix}s?([A-Z]\w*) = (\d+)", body)
    return [(snake(name), number) for name, number in found if name != "Count"]


def rows(text: str) -> Iterator[str]:
    text = re.sub(r"//.*", "", text)
    (body,) = re.findall(r"struct KernelArgs {(.*?)\n};", text, re.S)
    for fields in re.findall(r"^  (?:MM_\w+|float) ([\w, ]+);", body, re.M):
        yield from (f"MM_FIELD({name})" for name in fields.split(", "))
    for macro, enum, prefix in (
        ("MM_SLOT", "Slot", "kSlot"),
        ("MM_CONSTANT", "FunctionConstant", "kConstant"),
    ):
        yield from (f'{macro}("{name}")' for name, _ in numbered(text, enum, prefix))
    for of in re.findall(r"enum (\w+)Bits : ", text):
        if bits := numbered(text, f"{of}Bits", f"k{of}"):
            listed = " ".join(f'MM_BIT("{name}", {bit})' for name, bit in bits)
            yield f'MM_BITS("{snake(of).upper()}_BITS", {listed})'


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    macros = ("FIELD(name)", "SLOT(name)", "CONSTANT(name)", "BITS(name, bits)")
    names = [macro.partition("(")[0] for macro in macros]
    lines = [f"#ifndef MM_{n}\n#define MM_{m}\n#endif" for n, m in zip(names, macros, strict=True)]
    lines += [*rows(source.read_text()), *(f"#undef MM_{name}" for name in names)]
    out.write_text("\n".join([*lines, ""]))

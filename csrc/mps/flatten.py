"""Writes the shaders of metal/ as C++: what the Metal engine compiles at run time.

    python csrc/mps/flatten.py metal build/shaders.cpp

A shader is its text with every #include "…" in place of the line, each file once if it says so
(#pragma once). Headers are shared by shaders, so the C++ holds chunks of text and, for each shader,
the order of its chunks: 0.15 MB instead of 1.0. A #line before each chunk keeps the places of the
compiler's messages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_INCLUDE = re.compile(r'#include "([^"]+)"')
_ONCE = "#pragma once"


def chunks(file: Path, root: Path, seen: set[Path]) -> Iterator[str]:
    """The text of `file` and of what it includes, in pieces that begin with a #line.

    ValueError: a character outside ASCII, which Metal source may not have everywhere.
    """
    file = file.resolve()
    if file in seen:
        return
    text = file.read_text()
    name = f"{root.name}/{file.relative_to(root)}"
    if not text.isascii():
        raise ValueError(f"{name}: has a character outside ASCII")
    lines = text.splitlines()
    if _ONCE in lines:
        seen.add(file)
    begin = 0
    for i, line in [*enumerate(lines), (len(lines), None)]:
        include = _INCLUDE.fullmatch(line) if line is not None else None
        if line is not None and not include and line != _ONCE:
            continue
        if any(part.strip() for part in lines[begin:i]):
            yield "\n".join([f'#line {begin + 1} "{name}"', *lines[begin:i], ""])
        if include:
            yield from chunks(file.parent / include[1], root, seen)
        begin = i + 1


def flatten(folder: Path) -> dict[str, list[str]]:
    """{shader: its chunks} for every .metal file of `folder`, by the name without .metal."""
    root = folder.resolve()
    return {f.stem: list(chunks(f, root, set())) for f in sorted(root.glob("*.metal"))}


def cpp(shaders: dict[str, list[str]]) -> str:
    """The C++ of shaders(), declared in source.h."""
    numbers: dict[str, int] = {}
    rows = []
    for name, parts in shaders.items():
        order = [str(numbers.setdefault(part, len(numbers))) for part in parts]
        rows.append(f'{{"{name}", {{{", ".join(order)}}}}},')
    texts = ",\n".join(f'R"metal({part})metal"' for part in numbers)
    table = "\n".join(rows)
    return f"""#include "mps/source.h"

namespace metalmm::mps {{
const char* const kChunks[] = {{
{texts}}};
const std::vector<Shader>& shaders() {{
  static const auto* all = new std::vector<Shader>{{
{table}}};
  return *all;
}}
}}  // namespace metalmm::mps
"""


if __name__ == "__main__":
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.write_text(cpp(flatten(source)))

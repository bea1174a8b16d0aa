"""Writes the shaders of metal/ as C++: what the Metal engine compiles at run time.

    python csrc/mps/flatten.py metal build/shaders.cpp

The text of a kernel is its shader's, with every #include "…" in place of the line, each file once
if it says so (#pragma once), as far as that kernel needs it: of the declarations of namespaces only
those that it reaches, by name, from its shader, its format's struct and all that is kept anyway
(directives, enums, function constants, lines that are one macro). A name in common with something
unrelated keeps a declaration too many, never one too few. Lines that are comments go.

Declarations are shared by shaders and formats, so the C++ holds each once, and for each shader the
order of its own with the formats that need them. A #line before each keeps the places of the
compiler's messages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_INCLUDE = re.compile(r'#include "([^"]+)"')
_ONCE = "#pragma once"
# Defined for every text: of such an #if, the branch that is not taken is left out.
_ONLY = re.compile(r"#if (!?)defined\(MM_ONLY_\w+\)")
_NAMESPACE = re.compile(r"namespace \w+ \{|\}  // namespace \w+")
_COMMENT = re.compile(r"//.*")
_TEMPLATE = re.compile(r"template <([^<>]*)>\s*")
_STRUCT = re.compile(r"struct (\w+)\s*(<[^;{]*>)?")
_FUNCTION = re.compile(r"(?:METAL_FUNC|constexpr)\b[^(=]*?(\w+)\(")
_CONSTANT = re.compile(r"(\w+)(?:\[\w*\])? = ")
_ROW = re.compile(r"^MM_\w+ *\((\w+), *(\w+)", re.MULTILINE)
_WORD = re.compile(r"\w+")


@dataclass
class Snippet:
    """A declaration, or lines that are always kept: those have no names.

    arguments: of a full specialisation. It is needed where those are, if they are declared here; a
    partial one, whose arguments follow from parameters, where its name is.
    """

    text: str
    names: set[str] = field(default_factory=set)
    arguments: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)


def _code(line: str) -> str:
    """A line without its comment and without what its strings say."""
    return _COMMENT.sub("", re.sub(r'"[^"]*"', '""', line)).rstrip()


def _declaration(text: str, code: str) -> Snippet:
    """A declaration by what its code, from the beginning of a line, declares."""
    words, arguments = set(_WORD.findall(code)), set()
    template = _TEMPLATE.match(code)
    code = code[template.end() :] if template else code
    if m := _STRUCT.match(code):
        is_partial = template is not None and template[1] != ""
        arguments = set() if is_partial else set(_WORD.findall(m[2] or ""))
        names = {m[1]}
    elif m := re.match(r"using (\w+) =", code) or _FUNCTION.match(code):
        names = {m[1]}
    else:
        names = set(_CONSTANT.findall(code)) if code.startswith("MM_CONST ") else set()
    return Snippet(text, names, arguments, words)


def _ends(lines: Sequence[str], begin: int) -> int:
    """The line after the declaration or the directive that begins at a line."""
    depth, i = 0, begin
    if lines[begin].startswith("#"):
        while lines[i].endswith("\\"):
            i += 1
        return i + 1
    # A macro that is a line of its own has no ";".
    last = (";", "}", ")") if re.match(r"MM_(?!CONST)", lines[begin]) else (";", "}")
    while i < len(lines):
        code = _code(lines[i])
        depth += sum(code.count(c) for c in "({[") - sum(code.count(c) for c in ")}]")
        i += 1
        if depth == 0 and code.endswith(last):
            return i
    raise ValueError(f"line {begin + 1} begins what does not end: {lines[begin]}")


def _taken(lines: list[str]) -> list[str]:
    """`lines` with those empty that MM_ONLY_… rules out."""
    out, stack = [], []  # one for each #if around: None, or whether its branch is taken
    for line in lines:
        only = _ONLY.fullmatch(line)
        if re.match(r"#\s*if", line):
            stack.append(None if not only else only[1] == "")
            kept = not only
        elif re.match(r"#\s*(else|elif|endif)", line):
            kept = stack[-1] is None
            if line.startswith("#else") and not kept:
                stack[-1] = not stack[-1]
            elif line.startswith("#endif"):
                stack.pop()
        else:
            kept = True
        out.append(line if kept and False not in stack else "")
    return out


def snippets(file: Path, root: Path, seen: set[Path]) -> Iterator[Snippet]:
    """The snippets of `file` and of what it includes.

    ValueError: a character outside ASCII, which Metal source may not have everywhere; a declaration
    without an end.
    """
    file = file.resolve()
    if file in seen:
        return
    text = file.read_text()
    name = f"{root.name}/{file.relative_to(root)}"
    if not text.isascii():
        raise ValueError(f"{name}: has a character outside ASCII")
    lines = _taken(text.splitlines())
    if _ONCE in lines:
        seen.add(file)
    i = 0
    while i < len(lines):
        begin = i
        if not _code(lines[i]) or lines[i] == _ONCE:
            i += 1
        elif include := _INCLUDE.fullmatch(lines[i]):
            i += 1
            yield from snippets(file.parent / include[1], root, seen)
        elif _NAMESPACE.fullmatch(lines[i]):
            i += 1
            yield Snippet(lines[begin] + "\n")
        else:
            i = _ends(lines, begin)
            code = "\n".join(_code(line) for line in lines[begin:i])
            # An empty line keeps the places of those behind it.
            kept = ["" if _COMMENT.fullmatch(line.lstrip()) else line for line in lines[begin:i]]
            body = "\n".join([f'#line {begin + 1} "{name}"', *kept, ""])
            yield _declaration(body, code)


def reached(all_snippets: Sequence[Snippet], roots: set[str]) -> list[bool]:
    """Which snippets are kept without names, or named by `roots` or by another that is kept."""
    ours = set().union(*(p.names for p in all_snippets))
    names = [p.arguments & ours or p.names for p in all_snippets]
    kept = [not p.names for p in all_snippets]
    words = set(roots).union(*(p.words for p, k in zip(all_snippets, kept, strict=True) if k))
    grown = True
    while grown:
        grown = False
        for i, snippet in enumerate(all_snippets):
            if not kept[i] and names[i] & words:
                kept[i] = grown = True
                words |= snippet.words
    return kept


@dataclass
class Shader:
    """The snippets of a shader in order, and the formats of formats.def that need each, as bits."""

    snippets: list[Snippet]
    formats: list[int]

    def text(self, row: int) -> str:
        """The snippets that the format in that row of formats.def needs."""
        pairs = zip(self.snippets, self.formats, strict=True)
        return "".join(p.text for p, bits in pairs if bits >> row & 1)


def flatten(folder: Path) -> dict[str, Shader]:
    """Every .metal file under `folder`, by its name without .metal. Raises as snippets() does."""
    root = folder.resolve()
    structs = [m[1] for m in _ROW.findall((root / "formats.def").read_text())]
    out = {}
    for file in sorted(root.rglob("*.metal"), key=lambda f: f.stem):
        found = list(snippets(file, root, set()))
        rows = [reached(found, {struct}) for struct in structs]
        bits = [sum(kept[i] << row for row, kept in enumerate(rows)) for i in range(len(found))]
        out[file.stem] = Shader(found, bits)
    return out


def cpp(shaders: dict[str, Shader]) -> str:
    """The C++ of shaders(), declared in source.h."""
    numbers: dict[str, int] = {}
    rows = []
    for name, shader in shaders.items():
        pairs = zip(shader.snippets, shader.formats, strict=True)
        order = [
            f"{{{numbers.setdefault(p.text, len(numbers))}, {bits:#x}}}"
            for p, bits in pairs
            if bits
        ]
        rows.append(f'{{"{name}", {{{", ".join(order)}}}}},')
    texts = ",\n".join(f'R"metal({snippet})metal"' for snippet in numbers)
    table = "\n".join(rows)
    return f"""#include "mps/source.h"

namespace metalmm::mps {{
const char* const kSnippets[] = {{
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

"""Rewrites what clang's errors name in a text that Apple's front end takes.

Copies of structs between address spaces, conversions of vectors whose type is a template parameter:
the second step of the translation, after translate.py.
"""

from __future__ import annotations

import re

from .source import Edit

_ERROR = re.compile(
    r"^(?P<file>[^\n]*?):(?P<line>\d+):(?P<column>\d+):(?P<ranges>(?:\{[\d:-]+\})*):? "
    r"(?P<kind>error|note|fatal error):(?P<text>[^\n]*)$",
    re.MULTILINE,
)
# Casts that Metal rounds, and that clang does not convert.
_HALF_TO_BFLOAT = re.compile(r"cast from '.*' \(aka '(_Float16|__bf16)'\) to .* is not allowed")
_RANGE = re.compile(r"\{(\d+):(\d+)-(\d+):(\d+)\}")


def edits_of_errors(text: str, file: str, errors: str) -> list[Edit]:
    """Edits for those of clang's `errors` that name what Apple's front end accepts."""
    starts = [0] + [m.end() for m in re.finditer("\n", text)]
    lines = len(starts)

    def offset(line: str, column: str) -> int:
        return starts[int(line) - 1] + int(column) - 1

    edits: dict[tuple[int, int], list[Edit]] = {}
    found = [m for m in _ERROR.finditer(errors)]
    for n, m in enumerate(found):
        if m["kind"] == "note" or m["file"] != file:
            continue
        notes = ""
        for later in found[n + 1 :]:
            if later["kind"] != "note":
                break
            notes += later["text"]
        if int(m["line"]) > lines:
            continue  # in the tables after the text
        at = offset(m["line"], m["column"])
        ranges = [(offset(a, b), offset(c, d)) for a, b, c, d in _RANGE.findall(m["ranges"] or "")]
        new = _edits_of_error(text, m["text"], notes, at, ranges)
        if new:
            edits.setdefault((new[0].begin, new[0].end), new)
    return [e for group in edits.values() for e in group]


def _edits_of_error(
    text: str, message: str, notes: str, at: int, ranges: list[tuple[int, int]]
) -> list[Edit]:
    spaces = "address space" in notes or "__g" in message or "__local" in message
    if "no matching constructor" in message and spaces and ranges:
        begin, end = ranges[-1]
        return [Edit(begin, begin, "::metal::emulator::load("), Edit(end, end, ")")]
    if "no viable overloaded '='" in message and spaces and len(ranges) == 2:
        (left, _), (_, right) = ranges
        return [
            Edit(left, left, "::metal::emulator::store("),
            Edit(at, at + 1, ","),
            Edit(right, right, ")"),
        ]
    if "no viable overloaded operator[]" in message and len(ranges) == 2:
        for name, member in (("matrix<", ".columns"), ("array<", ".elements")):
            if name in message:
                return [Edit(ranges[0][1], ranges[0][1], member)]
    if _HALF_TO_BFLOAT.search(message) and ranges:
        begin, end = ranges[-1]
        return [Edit(begin, begin, "static_cast<float>("), Edit(end, end, ")")]
    if "C-style cast from vector" in message:
        match = re.compile(r"\(([^()]*)\)").match(text, at)
        if match and ranges:
            end = max(r[1] for r in ranges)
            construct = f"::metal::construct<{match[1]}>("
            return [Edit(at, match.end(), construct), Edit(end, end, ")")]
    if "parameter may not be qualified with an address space" in message:
        match = re.compile(r"\w+(?=\s*\[)").match(text, at)
        if match:  # T a[2][3] is T (*a)[3]
            return [
                Edit(at, match.end(), f"(*{match[0]})"),
                Edit(match.end(), text.index("]", at) + 1, ""),
            ]
    if "excess elements in" in message and re.search(r"[\w>]\s+$", text[max(at - 80, 0) : at]):
        match = re.compile(r"(\w+)\s*\(").match(text, at)
        if match and not re.search(r"\b(return|else|case)\s+$", text[max(at - 80, 0) : at]):
            type_ = f"__remove_cv(decltype({match[1]}))"  # float4 a(1, 2, 3, 4);
            return [Edit(at, match.end(), f"{match[1]} = ::metal::construct<{type_}>(")]
    if "excess elements in" in message or "from vector" in message or "only take one" in message:
        match = re.compile(r"(?:typename\s+)?[\w:]+(?:<[^()]*>)?(?=\s*\()").match(text, at)
        if match:
            return [Edit(at, match.end(), f"::metal::construct<{match[0]}>")]
    return []

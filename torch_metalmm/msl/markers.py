"""Line markers of a preprocessed text: the place of each line in the files it was made of."""

from __future__ import annotations

import re

_MARKER = re.compile(r'#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"')
# How far a loop is unrolled changes no result, and a macro that is expanded by then may say it.
_PRAGMA = re.compile(r"#\s*pragma (?!unroll|nounroll|clang loop)")


def unmark(text: str, name: str) -> tuple[str, list[tuple[str, int]]]:
    """`text` with empty lines for its line markers, and (file, line) of each line."""
    lines, places = [], []
    file, number = name, 1
    for line in text.split("\n"):
        marker = _MARKER.match(line)
        if marker:
            file, number = marker[2], int(marker[1])
            lines.append("")
            places.append((file, number))
            continue
        lines.append("" if line.startswith("#") and not _PRAGMA.match(line) else line)
        places.append((file, number))
        number += 1
    return "\n".join(lines), places


def mark(text: str, places: list[tuple[str, int]]) -> str:
    """`text` with line markers that name `places`."""
    out = []
    expected: tuple[str, int] | None = None
    for line, place in zip(text.split("\n"), places, strict=True):
        if place != expected:
            out.append(f'# {place[1]} "{place[0]}"')
        out.append(line)
        expected = (place[0], place[1] + 1)
    return "\n".join(out)

"""What the page on messages quotes is what the sources say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
OURS = "## What torch_metalmm says"
VALUE = "\0"  # in a message, what is filled in when it is raised
GAP = "…"  # the same in a quotation, or what a quotation leaves out
LEAST = 10  # letters in one piece: what can be searched for
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def python_texts(source: str) -> Iterator[str]:
    """The strings of a module: implicit concatenations as one, values as VALUE; and a field with
    what is wrong with it, which errors are given apart."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            field, what = map(python_text, node.args[:2])
            if what is not None:
                yield f"{VALUE if field is None else field}: {what}"
        elif (text := python_text(node)) is not None:
            yield text


def python_text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(str(p.value) if isinstance(p, ast.Constant) else VALUE for p in parts)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None  # type: ignore[attr-defined, no-any-return]


def native_texts(source: str) -> Iterator[str]:
    """The strings of each statement of C++ or Objective-C++, values between them as VALUE."""
    source = re.sub(r"^\s*(//|#include).*$", "", source, flags=re.M)
    source = re.sub(r'"\s+"', "", source)
    for statement in re.split(r";\s*\n", source):
        yield VALUE.join(LITERAL.findall(statement)).replace('\\"', '"')


@cache
def texts() -> tuple[str, ...]:
    files = [f for room in ("torch_metalmm", "cmake") for f in (ROOT / room).rglob("*.py")]
    found = [text for file in files for text in python_texts(file.read_text("utf-8"))]
    for file in sorted((ROOT / "csrc").rglob("*.[chm]*")):
        found += native_texts(file.read_text("utf-8"))
    return tuple(found)


def is_said(quotation: str, said: tuple[str, ...]) -> bool:
    """Whether one text has the parts of a quotation, in order, and no constant word between them
    where the quotation shows a value."""
    parts = [re.escape(part.strip()) for part in quotation.split(GAP) if part.strip()]
    pattern = re.compile(r"\s*\0?.*?".join(parts), re.S)
    return any(pattern.search(text) for text in said)


def quotations() -> list[str]:
    """The first column of the tables of our own messages."""
    ours = PAGE.read_text("utf-8").partition(OURS)[2]
    rows = re.findall(r"^\| (`.+?`) \|", ours, re.M)
    return [one for row in rows for one in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("quotation", quotations())
def test_a_message_of_a_page_is_one_of_the_sources(quotation: str) -> None:
    assert max(map(len, quotation.split(GAP))) >= LEAST, "too short to be found by"
    assert is_said(quotation, texts())

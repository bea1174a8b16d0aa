"""What the pages on messages quote is what the sources say, and no message is left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "messages").glob("*.md"))
SOURCES = sorted((ROOT / "torch_metalmm").rglob("*.py"))
OURS = "## What torch_metalmm says"
VALUE = "\0"  # in a message, what is filled in when it is raised
GAP = "…"  # the same in a quotation, or what a quotation leaves out
LEAST = 10  # letters in one piece: what can be searched for
# Of developers: who compiles shaders in a checkout.
UNSEEN_ROOMS = ("msl",)
NATIVE_ROOMS = ("cpu", "cuda", "gpu", "hooks", "mps", "ops")  # plan/: only what these pass it
# Python's protocols, and reasons that the message of another exception quotes.
UNSEEN = {
    *("AssertionError", "AttributeError", "IndexError", "KeyError", "NotImplementedError"),
    *("NoFormat", "Skipped", "Unknown", "_Gone", "_Unsupported", "_Whole"),
}
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def python_texts(source: str) -> Iterator[str]:
    """The strings of a module: implicit concatenations as one, values as VALUE."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def native_texts(source: str) -> Iterator[tuple[str, str]]:
    """Each statement of C++ or Objective-C++, and its strings, values between them as VALUE."""
    source = re.sub(r"^\s*(//|#include).*$", "", source, flags=re.M)
    source = re.sub(r'"\s+"', "", source)
    for statement in re.split(r";\s*\n", source):
        yield statement, VALUE.join(LITERAL.findall(statement)).replace('\\"', '"')


def native_files(room: Path) -> list[Path]:
    return sorted(f for f in room.rglob("*") if f.suffix in {".cpp", ".h", ".mm"})


@cache
def texts() -> tuple[str, ...]:
    files = [f for room in ("torch_metalmm", "cmake") for f in (ROOT / room).rglob("*.py")]
    found = [text for file in files for text in python_texts(file.read_text("utf-8"))]
    for file in native_files(ROOT / "csrc"):
        found += [text for _, text in native_texts(file.read_text("utf-8"))]
    return tuple(found)


def is_said(quotation: str, said: tuple[str, ...]) -> bool:
    """Whether one text has the parts of a quotation, in order, and no constant word between them
    where the quotation shows a value."""
    parts = [re.escape(part.strip()) for part in quotation.split(GAP) if part.strip()]
    pattern = re.compile(r"\s*\0?.*?".join(parts), re.S)
    return any(pattern.search(text) for text in said)


def letters(text: str, gap: str) -> int:
    """Of the longest piece between values."""
    return max(len(part.strip()) for part in text.split(gap))


@cache
def quotations() -> tuple[str, ...]:
    """The first column of the tables of our own messages."""
    found: list[str] = []
    for page in PAGES:
        text = page.read_text("utf-8")
        rows = re.findall(r"^\| (`.+?`) \|", text.partition(OURS)[2] or text, re.M)
        found += [one for row in rows for one in re.findall(r"`([^`]+)`", row)]
    return tuple(found)


@pytest.mark.parametrize("quotation", quotations())
def test_a_message_of_a_page_is_one_of_the_sources(quotation: str) -> None:
    assert letters(quotation, GAP) >= LEAST, "too short to be found by"
    assert is_said(quotation, texts())


def message_of(node: ast.expr) -> str:
    """What an argument of an exception says, as far as its constants tell."""
    if isinstance(node, ast.BinOp):
        return message_of(node.left) + message_of(node.right)
    if isinstance(node, ast.IfExp):
        return message_of(node.body) + VALUE + message_of(node.orelse)
    if isinstance(node, ast.JoinedStr | ast.Constant):
        return next(python_texts(ast.unparse(node)), VALUE)
    return VALUE


def raised(source: str) -> dict[int, list[str]]:
    """The messages of each raise and warning, by its line; also of one that has a name."""
    found: dict[int, list[str]] = {}
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        named: dict[str, list[ast.expr]] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named.setdefault(node.targets[0].id, []).append(node.value)
        for node in ast.walk(scope):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            if isinstance(node, ast.Raise) and name not in UNSEEN or name == "warnings.warn":
                given = [one for arg in call.args for one in named.get(ast.unparse(arg), [arg])]
                texts = map(message_of, given)
                found[call.lineno] = [text for text in texts if letters(text, VALUE) >= LEAST]
    return {line: texts for line, texts in found.items() if texts}


def thrown(source: str) -> list[str]:
    """The messages of the checks and exceptions of C++ or Objective-C++."""
    return [
        text
        for statement, text in native_texts(source)
        if re.search(r"\bTORCH_CHECK|\bthrow\b", statement) and letters(text, VALUE) >= LEAST
    ]


def is_on_a_page(text: str) -> bool:
    return any(is_said(one, (text,)) for one in quotations())


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_message_of_python_is_on_a_page(file: Path) -> None:
    if file.relative_to(ROOT / "torch_metalmm").parts[0] in UNSEEN_ROOMS:
        return
    found = raised(file.read_text("utf-8"))
    assert not {line: texts for line, texts in found.items() if not any(map(is_on_a_page, texts))}


@pytest.mark.parametrize("room", NATIVE_ROOMS)
def test_a_message_of_the_engines_is_on_a_page(room: str) -> None:
    found = [thrown(f.read_text("utf-8")) for f in native_files(ROOT / "csrc" / room)]
    assert any(found) and not [text for texts in found for text in texts if not is_on_a_page(text)]


def test_a_message_that_is_on_no_page_is_noticed() -> None:
    source = """
def f(a, b):
    warnings.warn(f"{a} is left as it was")
    if a:
        message = f"{a} must be a number, got {b}"
        raise ValueError(message)
    if b:
        raise ValueError(f"{a}: {b} no")
    raise Unknown("a reason for another")
"""
    assert list(raised(source).values()) == [
        ["\0 is left as it was"],
        ["\0 must be a number, got \0"],
    ]


def test_a_message_that_is_gone_is_noticed() -> None:
    native = [text for _, text in native_texts('f("a b " + c, "d");\n')]
    said = (*python_texts('f"no such {kind}: " f"{path}"'), *native)
    assert is_said("no such …:", said) and is_said("a b …d", said)
    assert not is_said("no such file: …", said) and not is_said("d … a b", said)
    native = 'if (a) throw E("no row " + b + " here");\nf("another row of it");\n'
    assert thrown(native) == [] and thrown(native.replace("no row", "no such row")) == [
        "no such row \0 here"
    ]

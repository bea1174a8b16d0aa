"""Reads Metal Shading Language: the kernels of a text, their arguments, the function constants.

The text is preprocessed first, with no word of Metal defined as a macro, so that a kernel made by a
macro reads as one that is written out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import _C

TABLES = "mm_tables"  # the file of the C++ that follows the text of a shader
# Attributes of kernel parameters, and the enumerator of each in csrc/msl/host/abi.h.
ROLES: dict[str, str] = _C.EMULATOR_ROLES
_SYNONYMS = {
    "dispatch_threads_per_threadgroup": "threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
    "thread_execution_width": "threads_per_simdgroup",
    "grid_size": "threads_per_grid",
}

_TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>\.?[0-9](?:[eEpP][+-]|[\w.'])*)|(?P<word>[A-Za-z_]\w*)
    |(?P<punct>::|\.\.\.|->|\+\+|--|<<=?|&&|\|\||[-+*/%&|^!=<>]=|.)""",
    re.VERBOSE | re.DOTALL,
)
_INTEGERS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
_SCALARS = (*_INTEGERS, "half", "bfloat", "float")
VECTORS = frozenset(f"{t}{n}" for t in _SCALARS for n in (2, 3, 4))
_CLOSE = {"(": ")", "[": "]", "{": "}"}
_CLOSERS = frozenset(_CLOSE.values())


@dataclass(slots=True)
class Token:
    """A word of the text: `at` is its offset, `end` the offset after it."""

    kind: str
    text: str
    at: int

    @property
    def end(self) -> int:
        return self.at + len(self.text)


@dataclass
class Kernel:
    """A kernel to launch: its host name, the C++ expression of it, (role, index) per argument."""

    name: str
    expression: str
    arguments: list[tuple[str, str]]


@dataclass
class Constant:
    """A function constant: `index` is an expression in `namespace`, `symbol` its storage."""

    name: str
    index: str
    namespace: str
    symbol: str


@dataclass
class Edit:
    """Replaces text[begin:end] with `text`."""

    begin: int
    end: int
    text: str


@dataclass
class Source:
    """The declarations of a text, and the edits that let plain clang compile it."""

    kernels: list[Kernel] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)


class MetalSyntaxError(ValueError):
    """The text is not Metal Shading Language; the message names file and line."""


@functools.lru_cache(1)  # 0.1 s of a kernel's text, whose rules and declarations are read in turn
def lex(text: str) -> list[Token]:
    """The words of `text`, without spaces, comments and line markers. Not to be changed."""
    return [Token(m.lastgroup, m[0], m.start()) for m in _TOKEN.finditer(text) if m.lastgroup]


def matching(tokens: list[Token], at: int) -> int:
    """The index of the bracket that closes tokens[at]; len(tokens) if none does."""
    depth = 0
    for i in range(at, len(tokens)):
        if tokens[i].text in _CLOSE:
            depth += 1
        elif tokens[i].text in _CLOSERS:
            depth -= 1
            if depth == 0:
                return i
    return len(tokens)


def closing_angle(tokens: list[Token], at: int) -> int:
    """The index of the ">" that closes tokens[at] == "<"; len(tokens) if the "<" compares."""
    depth, i = 0, at
    while i < len(tokens):
        text = tokens[i].text
        if text in _CLOSE:
            i = matching(tokens, i)
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        elif text == ";" or text == "}":
            break
        i += 1
    return len(tokens)


def is_pointer_cast(tokens: list[Token], begin: int, close: int) -> bool:
    """Whether tokens[begin] "(" … tokens[close] ")" is a cast to a pointer: (device T*)x."""
    if close + 1 >= len(tokens) or tokens[close].text != ")" or tokens[close - 1].text != "*":
        return False
    inside, after = tokens[begin + 1 : close], tokens[close + 1]
    types = all(t.kind == "word" or t.text in ("*", "::", "<", ">", ",") for t in inside)
    before = tokens[begin - 1] if begin else tokens[begin]
    called = before.text in (")", "]", ">") or (before.kind == "word" and before.text != "return")
    operand = after.kind != "punct" or after.text in ("(", "&", "*")
    return types and not called and operand and inside[0].kind == "word"


def _is_attribute(tokens: list[Token], i: int) -> bool:
    return (
        tokens[i].text == "["
        and i + 1 < len(tokens)
        and tokens[i + 1].text == "["
        and tokens[i + 1].at == tokens[i].end
    )


def _attributes(tokens: list[Token]) -> Iterator[list[Token]]:
    """The words between [[ and ]] of each attribute list in `tokens`."""
    i = 0
    while i < len(tokens):
        if _is_attribute(tokens, i):
            end = matching(tokens, i)
            yield tokens[i + 2 : end - 1]
            i = end
        i += 1


def _without_attributes(tokens: list[Token]) -> list[Token]:
    kept, i = [], 0
    while i < len(tokens):
        if _is_attribute(tokens, i):
            i = matching(tokens, i)
        else:
            kept.append(tokens[i])
        i += 1
    return kept


def split(tokens: list[Token], by: str = ",") -> list[list[Token]]:
    """`tokens` cut at each `by` that is in no bracket."""
    parts: list[list[Token]] = [[]]
    i = 0
    angle = 0
    while i < len(tokens):
        text = tokens[i].text
        if text in _CLOSE:
            end = matching(tokens, i)
            parts[-1].extend(tokens[i : end + 1])
            i = end + 1
            continue
        angle += {"<": 1, ">": -1}.get(text, 0)
        if text == by and angle <= 0:
            parts.append([])
        else:
            parts[-1].append(tokens[i])
        i += 1
    return [p for p in parts if p]


def _text(tokens: list[Token]) -> str:
    return " ".join(t.text for t in tokens)


def _argument(tokens: list[Token], used: dict[str, int]) -> tuple[str, str]:
    """(role, index expression) of one kernel argument; the next free index if it has none."""
    parts = [p for a in _attributes(tokens) for p in split(a)]
    optional = any(p[0].text == "function_constant" for p in parts)
    for part in parts:
        word = _SYNONYMS.get(part[0].text, part[0].text)
        if word in ROLES:
            index = _text(part[2:-1]) if len(part) > 2 else "0"
            word = "optional_buffer" if word == "buffer" and optional else word
            return word, index
    words = [t.text for t in tokens]
    kind = "threadgroup" if "threadgroup" in words else "buffer"
    used[kind] = used.get(kind, -1) + 1
    return kind, str(used[kind])


def declarations(
    tokens: list[Token], i: int, end: int, namespace: str = "", is_member: bool = False
) -> Iterator[tuple[list[Token], int, int, str, bool]]:
    """(words before its body or ";"; places of its body's "{" and "}", or 0; namespace; whether
    it is a member of a struct) of each declaration in tokens[i:end]."""
    begin = i
    while i < end:
        text = tokens[i].text
        if text == "{":
            close = matching(tokens, i)
            head = tokens[begin:i]
            words = [t.text for t in split_head(_without_attributes(head))]
            if "namespace" in words or words[:1] == ["extern"]:
                path = (
                    "".join(words[words.index("namespace") + 1 :]) if words[0] != "extern" else ""
                )
                inner = f"{namespace}::{path}" if path else namespace
                yield from declarations(tokens, i + 1, close, inner)
            elif {"struct", "class", "union"} & set(words) and "(" not in words:
                yield from declarations(tokens, i + 1, close, namespace, is_member=True)
                i = close + 1
                while i < end and tokens[i].text != ";":  # variables of the type
                    i += 1
                begin = i = i + 1
                continue
            elif not _ends_with_function(head):
                i = close + 1
                continue
            else:
                yield head, i, close, namespace, is_member
            i = begin = close + 1
        elif text == ";":
            yield tokens[begin:i], 0, 0, namespace, is_member
            i = begin = i + 1
        elif text == ":" and i and tokens[i - 1].text in ("public", "private", "protected"):
            i = begin = i + 1
        else:
            i = matching(tokens, i) + 1 if text in ("(", "[") else i + 1


def parameters_at(head: list[Token]) -> int | None:
    """The place of the "(" of a function's parameters, if there is one."""
    i = len(head) - len(split_head(head))
    while i < len(head) and not (head[i].text == "(" and i and head[i - 1].kind == "word"):
        i = matching(head, i) + 1 if head[i].text == "[" else i + 1
    return i if i < len(head) else None


class Reader:
    """Walks a preprocessed text once, and collects a Source."""

    def __init__(self, text: str) -> None:
        self.tokens = lex(text)
        self.source = Source()
        self.templates: dict[str, list[tuple[str, str]]] = {}
        self._instances: list[tuple[str, str, str, str]] = []

    def read(self) -> Source:
        """The kernels and function constants of the text."""
        for head, body, _, namespace, is_member in declarations(self.tokens, 0, len(self.tokens)):
            if not is_member:
                self._declaration(head, namespace, body > 0)
        for name, namespace, function, expression in self._instances:
            if function in self.templates:
                self.source.kernels.append(
                    Kernel(name, f"{namespace}::{expression}", self.templates[function])
                )
        return self.source

    def _declaration(self, tokens: list[Token], namespace: str, body: bool) -> None:
        attributes = [a for a in _attributes(tokens) if a]
        plain = _without_attributes(tokens)
        words = [t.text for t in plain]
        for attribute in attributes:
            if attribute[0].text == "function_constant" and len(attribute) > 3:
                self._constant(attribute, plain, namespace)
        is_kernel = "kernel" in words or any(a[0].text == "kernel" for a in attributes)
        hosts = [a[2:-1] for a in attributes if a[0].text == "host_name"]
        names = ["".join(t.text[1:-1] for t in h) for h in hosts]
        if words[:1] == ["template"] and words[1:2] != ["<"]:
            self._instance(plain, names, namespace)
        elif is_kernel and body:
            self._kernel(tokens, words[:1] == ["template"], names, namespace)

    def _constant(self, attribute: list[Token], plain: list[Token], namespace: str) -> None:
        name = [t.text for t in plain if t.kind == "word"][-1]
        index = _text(attribute[2:-1])
        symbol = "mm_fc_" + "".join(t.text for t in attribute[2:-1])
        self.source.constants.append(Constant(name, index, namespace, symbol))

    def _kernel(self, tokens: list[Token], template: bool, names: list[str], ns: str) -> None:
        if (i := parameters_at(tokens)) is None:
            return
        used: dict[str, int] = {}
        parameters = split(tokens[i + 1 : matching(tokens, i)])
        arguments = [_argument(p, used) for p in parameters]
        function = tokens[i - 1].text
        self.templates[function] = arguments
        if not template:
            name = names[0] if names else function
            self.source.kernels.append(Kernel(name, f"{ns}::{function}", arguments))

    def _instance(self, plain: list[Token], names: list[str], ns: str) -> None:
        """template … f<args>(…);  the last name<…> before ( or the end is the function."""
        i = 1
        while i < len(plain):
            if plain[i].text == "<" and plain[i - 1].kind == "word":
                end = closing_angle(plain, i)
                if end + 1 == len(plain) or plain[end + 1].text == "(":
                    expression = _text(plain[i - 1 : end + 1])
                    name = names[0] if names else expression.replace(" ", "")
                    self._instances.append((name, ns, plain[i - 1].text, expression))
                    return
                i = end + 1
            elif plain[i].text == "(":
                i = matching(plain, i) + 1
            else:
                i += 1


def _ends_with_function(tokens: list[Token]) -> bool:
    """Whether `tokens` before a "{" are a function's head (else a struct's or an initializer's)."""
    head = split_head(_without_attributes(tokens))
    words, i = [], 0
    while i < len(head):
        words.append(head[i].text)
        i = matching(head, i) + 1 if head[i].text in _CLOSE else i + 1
    return not {"=", "struct", "class", "union", "enum"} & set(words)


def split_head(tokens: list[Token]) -> list[Token]:
    """`tokens` without a leading template<…>."""
    if len(tokens) > 1 and tokens[0].text == "template" and tokens[1].text == "<":
        return tokens[closing_angle(tokens, 1) + 1 :]
    return tokens

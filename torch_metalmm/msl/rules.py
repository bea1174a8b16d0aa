"""Code that Metal forbids and C++ with address spaces lets pass, found in a preprocessed text.

The rules are those of the Metal Shading Language Specification (2.1 types, 4 address spaces, 5.1
functions; 1.5.4 restrictions: excluded.py); compilers of Apple word them the same way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .excluded import Error, excluded, internal_parts, recursion
from .source import (
    _SCALARS,
    _SYNONYMS,
    ROLES,
    VECTORS,
    MetalSyntaxError,
    Token,
    _attributes,
    _without_attributes,
    closing_angle,
    declarations,
    is_pointer_cast,
    lex,
    matching,
    parameters_at,
    split,
    split_head,
)
from .words import misused

SPACES = ("device", "constant", "threadgroup", "thread", "threadgroup_imageblock", "ray_data")
# Parts of Metal that the emulator does not run.
_ABSENT = re.compile(
    r"texture(1d|2d|3d|cube|_buffer)\w*|depth(2d|cube)\w*|visible_function_table|tensor"
    r"|intersect(or|ion_function_table)|acceleration_structure|imageblock|render_grid"
)
_ABSENT_WORDS = frozenset({"simdgroup_event", "__metal_simdgroup_event_t", "command_buffer"})
_POSITIONS = frozenset(ROLES) - {"buffer", "optional_buffer", "threadgroup"}
_INDEX_ROLES = frozenset(
    r for r in ROLES if "index_in" in r or "per_simd" in r or "groups_per" in r
)
_NO_VARIABLE = frozenset(
    {"typedef", "using", "static_assert", "struct", "class", "union", "enum", "namespace"}
    | {"friend", "template", "operator", "kernel", "vertex", "fragment", "constant"}
)


def violations(
    text: str, standard: frozenset[str] = frozenset(), version: int = 310, ours: bool = False
) -> list[Error]:
    """(word, message) of all that Metal forbids in `text`, in its order.

    standard: names of functions of the standard library. version: __METAL_VERSION__. ours: whether
    the text is of metal/, where names of the library stay free (words.py).
    """
    tokens = lex(text)
    checker = _Checker(tokens, standard)
    checker.words()
    for head, body, close, _, is_member in declarations(tokens, 0, len(tokens)):
        (checker.member if is_member else checker.outside)(head, body, close)
    checker.errors += misused(tokens, ours)
    checker.errors += excluded(tokens, internal_parts(text), version)
    checker.errors += recursion(tokens, checker.functions, checker.is_standard)
    return sorted(checker.errors, key=lambda e: e[0].at)


def check_rules(
    text: str,
    places: Sequence[tuple[str, int]],
    standard: frozenset[str],
    version: int,
    ours: bool = False,
) -> None:
    """Raises MetalSyntaxError for what Metal forbids in `text`, whose lines come from `places`."""
    errors = []
    for token, message in violations(text, standard, version, ours):
        before = text[: token.at]
        file, line = places[before.count("\n")]
        column = token.at - before.rfind("\n")
        errors.append(f"{file}:{line}:{column}: error: {message}")
    if errors:
        raise MetalSyntaxError("\n".join(errors))


class _Checker:
    def __init__(self, tokens: list[Token], standard: frozenset[str]) -> None:
        self.tokens = tokens
        self.standard = standard
        self.errors: list[Error] = []
        self.functions: dict[str, list[tuple[Token, int, int]]] = {}

    def text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def fail(self, token: Token, message: str) -> None:
        self.errors.append((token, message))

    def words(self) -> None:
        """Checks the rules of one or two words."""
        for i, token in enumerate(self.tokens):
            text, after = token.text, self.text(i + 1)
            if text in _ABSENT_WORDS or (_ABSENT.fullmatch(text) and after == "<"):
                self.fail(token, f"the emulator has no {text}")
            elif text in SPACES and self.text(i - 1) != "[":
                self._one_space(i)
            elif text == "..." and after == ")" and self.text(i - 1) in (",", "("):
                self.fail(token, "variadic functions are not supported in Metal")
            if text == "*" and after == ")":
                begin = self._open(i + 1)
                if is_pointer_cast(self.tokens, begin, i + 1):
                    self._spaces(self.tokens[begin + 1 : i + 1])

    def _one_space(self, i: int) -> None:
        """Reports a second address space before the next "*"."""
        j = i + 1
        while j < len(self.tokens) and (
            self.tokens[j].kind == "word" or self.tokens[j].text in ("::", "<")
        ):
            if self.tokens[j].text in SPACES:
                pair = f"'{self.text(i)}' and '{self.text(j)}'"
                return self.fail(self.tokens[j], f"multiple address spaces for one type: {pair}")
            j = closing_angle(self.tokens, j) + 1 if self.tokens[j].text == "<" else j + 1

    def _open(self, close: int) -> int:
        """The index of the "(" that the ")" at `close` closes."""
        depth, i = 0, close
        while i >= 0:
            depth += {")": 1, "(": -1}.get(self.text(i), 0)
            if depth == 0:
                return i
            i -= 1
        return 0

    def _spaces(self, declaration: list[Token]) -> None:
        """Reports a "*" or "&" of `declaration` whose type names no address space."""
        parts = _without_attributes(declaration)
        i = 0
        while i < len(parts):
            if parts[i].text == "<":
                i = closing_angle(parts, i)
            elif parts[i].text in ("(", "[", "="):
                return
            elif parts[i].text in ("*", "&"):
                words = {t.text for t in parts[:i]}
                if not words & {*SPACES, "auto", "void_t"}:
                    kind = "pointer" if parts[i].text == "*" else "reference"
                    self.fail(parts[i], f"{kind} type must have explicit address space qualifier")
                return
            i += 1

    def member(self, head: list[Token], body: int, close: int) -> None:
        """A declaration in a struct."""
        plain = _without_attributes(head)
        words = [t.text for t in plain]
        function = "(" in words and "=" not in words[: words.index("(")]
        if body:
            if function and words[0] != "template":
                self._define(plain, body, close)
            self.body(body, close)
        elif "static" in words and not function and "constant" not in words:
            token = plain[words.index("static")]
            self.fail(token, "a static member must reside in constant address space")

    def outside(self, head: list[Token], body: int, close: int) -> None:
        """A declaration in a namespace."""
        template = bool(head) and head[0].text == "template"
        if template and len(head) > 1 and head[1].text != "<":
            return  # an instance
        plain = split_head(_without_attributes(head))
        words = [t.text for t in plain]
        if not words or words[0] in ("}", "using", "typedef", "static_assert"):
            return
        call = words.index("(") if "(" in words else 0
        operator = "operator" in words
        function = (
            call
            and (body or operator or "=" not in words[:call])
            and not ("constant" in words[:call] and not body)
        )
        if function:
            self.parameters(head, kernel="kernel" in [t.text for t in head])
            if call and words[call - 1] == "main":
                self.fail(plain[call - 1], "a function may not be called main in Metal")
            if body and not template and call:
                self._define(plain, body, close)
            if body:
                self.body(body, close)
        elif not set(words) & _NO_VARIABLE and not body and len(words) > 1:
            self.fail(plain[0], "program scope variable must reside in constant address space")
        elif "constant" in words and not body and not {"=", "(", "extern"} & set(words):
            attributes = {a[0].text for a in _attributes(head) if a}
            if "function_constant" not in attributes:
                self.fail(plain[0], "a variable in constant address space must be initialized")

    def _define(self, plain: list[Token], body: int, close: int) -> None:
        """Keeps the body of a function, no operator or constructor, for recursion()."""
        words = [t.text for t in plain]
        call = words.index("(")
        typed = set(words[: call - 1]) - {"METAL_FUNC", "inline", "static", "constexpr", "explicit"}
        if typed and "operator" not in typed and plain[call - 1].kind == "word":
            self.functions.setdefault(words[call - 1], []).append((plain[call - 1], body, close))

    def parameters(self, head: list[Token], kernel: bool) -> None:
        """The parameters and, of a kernel, the type of the result and of attributes."""
        if (i := parameters_at(head)) is None:
            return
        if kernel and "void" not in [t.text for t in head[:i]]:
            self.fail(head[i - 1], "a kernel function must return void")
        for parameter in split(head[i + 1 : matching(head, i)]):
            self._spaces(parameter)
            if kernel:
                self._kernel_parameter(parameter)

    def _kernel_parameter(self, parameter: list[Token]) -> None:
        plain = [t for t in _without_attributes(parameter) if t.kind == "word"]
        words = [t.text for t in _without_attributes(parameter)]
        indirect = {"*", "&"} & set(words)
        for attribute in _attributes(parameter):
            for part in split(attribute):
                role = _SYNONYMS.get(part[0].text, part[0].text)
                if role == "buffer" and indirect and not {"device", "constant"} & set(words):
                    self.fail(plain[0], "a buffer must be in device or constant address space")
                elif role == "threadgroup" and "threadgroup" not in words:
                    self.fail(plain[0], "[[threadgroup(i)]] takes a threadgroup pointer")
                elif role in _POSITIONS:
                    types = {"uint", "ushort", "uint2", "ushort2", "uint3", "ushort3"}
                    if role in _INDEX_ROLES - {"threadgroups_per_grid"}:
                        types = {"uint", "ushort"}
                    known = [w for w in words if w in _SCALARS or w in VECTORS]
                    if known and known[0] not in types:
                        allowed = ", ".join(sorted(types))
                        message = f"type '{known[0]}' is not valid for attribute '{part[0].text}'"
                        self.fail(plain[0], f"{message}; allowed: {allowed}")

    def body(self, begin: int, close: int) -> None:
        """The statements of a function."""
        for i in range(begin, close):
            token = self.tokens[i]
            if token.text in ("{", ";", "}") and self.tokens[i + 1].kind == "word":
                self._statement(i + 1)
            if token.text == "static":
                j = i + 1
                while self.tokens[j].kind == "word":
                    j += 1
                words = {t.text for t in self.tokens[i - 2 : j]}
                if "constant" not in words:
                    self.fail(token, "a static variable must reside in constant address space")
            if token.text == "(" and self.text(i + 1) == "*" and self.text(i + 3) == ")":
                before = self.tokens[i - 1]
                named = before.kind == "word" and self.tokens[i + 2].kind == "word"
                if named and self.text(i + 4) == "(" and before.text in (*_SCALARS, "void"):
                    self.fail(self.tokens[i + 2], "function pointers are not supported in Metal")

    def _statement(self, i: int) -> None:
        """Reports `T* p = …;` and `T& r = …;` with no address space."""
        first = i
        while self.tokens[i].kind == "word" or self.tokens[i].text in ("::", "<"):
            i = closing_angle(self.tokens, i) + 1 if self.tokens[i].text == "<" else i + 1
            if i >= len(self.tokens):
                return
        head = {t.text for t in self.tokens[first:i]}
        declared = self.text(i) in ("*", "&") and self.text(i + 2) in ("=", ";")
        if declared and not head & {"return", "typedef", "using", "case", "else", "delete"}:
            self._spaces(self.tokens[first : i + 1])

    def is_standard(self, name: str) -> bool:
        """Whether the standard library has a function of that name."""
        return name in self.standard or name.startswith(("simd_", "quad_"))

"""The C++ that Metal leaves out (its specification, 1.5.4), found in a preprocessed text.

The list, in the specification's order: lambda expressions (before Metal 3.2), recursion,
dynamic_cast, type identification, new and delete, the noexcept operator, goto, register and
thread_local, virtual functions, derived classes, exceptions, the standard library; and no function
is called main. rules.py finds what has no address space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from .source import Token, closing_angle, matching

Error = tuple[Token, str]
# Words that are an error wherever they stand. Metal has only one use of them: "= delete".
_WORDS = frozenset(
    {"dynamic_cast", "typeid", "new", "delete", "goto", "register", "thread_local", "virtual"}
    | {"try", "catch", "throw", "double", "asm", "__asm", "__asm__", "__int128", "_BitInt"}
)
_LAMBDAS = 320  # the first __METAL_VERSION__ that has them
# Words before a "[" that begins a lambda; after any other one it is an index.
_BEFORE_LAMBDA = frozenset({"return", "case", "else", "do"})
_INTERNALS = re.compile(r"^\s*#\s*pragma\s+METAL\s+internals\s*:\s*(enable|disable)", re.MULTILINE)


def internal_parts(text: str) -> list[range]:
    """The parts of `text` where `#pragma METAL internals : enable` holds.

    There, and nowhere else, Apple's compiler takes what its own library is written in: derived
    structs.
    """
    parts, begin = [], None
    for m in _INTERNALS.finditer(text):
        if m[1] == "enable" and begin is None:
            begin = m.end()
        elif m[1] == "disable" and begin is not None:
            parts.append(range(begin, m.start()))
            begin = None
    return parts if begin is None else [*parts, range(begin, len(text))]


def excluded(
    tokens: Sequence[Token], internals: Sequence[range] = (), version: int = 310
) -> Iterator[Error]:
    """(word, message) of what `tokens` use and Metal lacks, except recursion.

    internals: of internal_parts(). version: __METAL_VERSION__.
    """
    tokens = list(tokens)
    for i, token in enumerate(tokens):
        before = tokens[i - 1].text if i else ""
        after = tokens[i + 1].text if i + 1 < len(tokens) else ""
        if token.text in _WORDS and not (token.text == "delete" and before == "="):
            yield token, f"'{token.text}' is not supported in Metal"
        elif token.text == "long" and after in ("long", "double"):
            yield token, f"'long {after}' is not supported in Metal"
        elif token.text == "std" and after == "::":
            yield token, "the C++ standard library is not supported in Metal"
        elif token.text == "noexcept" and after == "(" and before not in (")", "const"):
            yield token, "the noexcept operator is not supported in Metal"
        elif token.text == "[" and version < _LAMBDAS and _begins_lambda(tokens, i):
            yield token, "lambda expressions are not supported in Metal before 3.2"
        elif (
            token.text in ("struct", "class")
            and before != "enum"
            and _is_derived(tokens, i)
            and not any(token.at in part for part in internals)
        ):
            yield token, "derived classes are not supported in Metal"


def _begins_lambda(tokens: list[Token], i: int) -> bool:
    """Whether the "[" at i opens captures: it follows no operand, and "(" or "{" follows it."""
    before = tokens[i - 1] if i else Token("punct", ";", 0)
    operand = before.kind != "punct" and before.text not in _BEFORE_LAMBDA
    if operand or before.text in (")", "]", ">") or tokens[i + 1].text == "[":
        return False
    after = matching(tokens, i) + 1
    return after < len(tokens) and tokens[after].text in ("(", "{")


def _is_derived(tokens: list[Token], i: int) -> bool:
    """Whether the struct at i names bases: a ":" with a name behind it, before its body."""
    i += 1
    while i + 1 < len(tokens):
        token = tokens[i]
        if token.text == ":":
            return tokens[i + 1].kind == "word" or tokens[i + 1].text == "::"
        if token.text == "<":
            i = closing_angle(tokens, i)
        elif token.text in ("[", "(") and tokens[i - 1].text in ("[", "alignas", "__attribute__"):
            i = matching(tokens, i)
        elif token.kind != "word" and token.text not in ("::", "[", "]"):
            return False
        i += 1
    return False


def recursion(
    tokens: Sequence[Token],
    functions: Mapping[str, list[tuple[Token, int, int]]],
    is_standard: Callable[[str], bool],
) -> Iterator[Error]:
    """Functions, free or of a struct, that reach themselves.

    functions: {name: (its word, begin and end of the body) of each definition}. Only names with one
    definition that is no template: which overload or instance a call means is not seen in the text,
    and both may end where the function does not.
    """
    once = {
        name: found[0]
        for name, found in functions.items()
        if len(found) == 1 and not is_standard(name)  # else it may call the overload there
    }
    calls = {
        name: {
            tokens[n].text
            for n in range(begin, close)
            if tokens[n].text in once
            and tokens[n + 1].text == "("
            and (tokens[n - 1].text not in (".", "->", "::") or tokens[n - 2].text == "this")
        }
        for name, (_, begin, close) in once.items()
    }
    for name, (token, _, _) in once.items():
        seen: set[str] = set()
        todo = list(calls[name])
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += calls[one]
        if name in seen:
            yield token, f"recursion is not supported: {name} calls itself"

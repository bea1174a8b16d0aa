"""Rewrites Metal Shading Language that Apple's front end takes and plain clang does not.

Only texts of others (torch_metalmm.testing.MetalSource) need it; the shaders of metal/ are compiled
as they are. Two steps: here, what can be seen in the text (attributes, vector constructors,
threadgroup variables in kernels); then, in repair.py, what clang's own errors name.
"""

from __future__ import annotations

import re

from .source import (
    VECTORS,
    Edit,
    Source,
    Token,
    _is_attribute,
    closing_angle,
    is_pointer_cast,
    lex,
    matching,
)

# One copy per thread of the host, which runs one threadgroup at a time; the emulator poisons it.
_STORAGE = "[[clang::loader_uninitialized]] static thread_local "
_ACCESS = ("public", "private", "protected")
# A literal that is double in C++ and float in Metal. -cl-single-precision-constant forgets those in
# templates.
_DOUBLE = re.compile(
    r"(?!0[xX])(?=[\d'.]*[.eE])[\d.][\d'.]*(?:[eE][+-]?\d+)?|0[xX][\da-fA-F.]+[pP][+-]?\d+"
)
_NARROW = re.compile(r"(?!0[xX])([\d.][\d'.]*(?:[eE][+-]?\d+)?)(h|H|bf|BF)")
_UNARY = frozenset({"*", "&", "-", "+", "!", "~", "++", "--"})


def apply(text: str, edits: list[Edit]) -> str:
    """`text` with all `edits` done. An edit at the place of another is done in the order given."""
    out, at = [], 0
    for e in sorted(edits, key=lambda e: (e.begin, e.end)):
        if e.begin < at:
            continue  # inside a replaced part
        out += [text[at : e.begin], e.text]
        at = e.end
    return "".join(out) + text[at:]


def visible_edits(text: str, source: Source) -> list[Edit]:
    """The edits that need no types. Removed text leaves its newlines."""
    tokens = lex(text)
    edits: list[Edit] = []
    symbols = iter(f"mm_fc_{i}" for i in range(len(source.constants)))
    bodies = 0
    i = 0
    while i < len(tokens):
        token = tokens[i]
        if _is_attribute(tokens, i):
            end = matching(tokens, i)
            edits.append(_attribute(text, tokens[i : end + 1], symbols))
            i = end + 1
            continue
        if token.text == "(" and (method := _method_of_a_space(tokens, i)):
            edits = [e for e in edits if e.end <= method.begin]
            method.text = "\n" * text.count("\n", method.begin, method.end)
            edits.append(method)
            while i < len(tokens) and tokens[i].at < method.end:
                i += 1
            continue
        if token.text == "{":
            bodies += 1
        elif token.text == "}":
            bodies -= 1
        elif token.kind == "number" and _DOUBLE.fullmatch(token.text):
            edits.append(Edit(token.end, token.end, "f"))
        elif token.kind == "number" and (narrow := _NARROW.fullmatch(token.text)):
            type_ = "half" if narrow[2] in "hH" else "bfloat"
            edits.append(Edit(token.at, token.end, f"static_cast<{type_}>({narrow[1]}L)"))
        elif token.text == "threadgroup" and bodies and _declares_storage(tokens, i):
            edits.append(Edit(token.at, token.at, _STORAGE))
        edits += _vector_words(tokens, i) or _pointer_cast(tokens, i) or _logger(tokens, i)
        i += 1
    return edits


def _attribute(text: str, tokens: list[Token], symbols: object) -> Edit:
    begin, end = tokens[0].at, tokens[-1].end
    newlines = "\n" * text.count("\n", begin, end)
    if tokens[2].text == "function_constant":
        symbol = next(symbols)  # type: ignore[call-overload]
        kept = f'[[clang::loader_uninitialized, gnu::alias("{symbol}")]]'
        return Edit(begin, end, kept + newlines)
    return Edit(begin, end, newlines)


def _declares_storage(tokens: list[Token], i: int) -> bool:
    """Whether tokens[i] == "threadgroup" begins a variable of a function, not a pointer."""
    before = i - 1
    if before >= 0 and tokens[before].text == ")":  # alignas(16) threadgroup …
        while before >= 0 and tokens[before].text != "alignas":
            before -= 1
        before -= 1
    if before < 0 or tokens[before].text not in "{};":
        return False
    j = i + 1
    while j < len(tokens) and tokens[j].text not in ("=", ";", ")"):
        if tokens[j].text == "<":
            j = closing_angle(tokens, j)
        elif tokens[j].text in ("__attribute__", "alignas", "decltype"):
            j = matching(tokens, j + 1)
        elif tokens[j].text == "[":
            return True
        elif tokens[j].text in ("*", "&", "("):
            return False
        j += 1
    return j < len(tokens) and tokens[j].text == ";"


def _method_of_a_space(tokens: list[Token], i: int) -> Edit | None:
    """The removal of a member function for objects in device, constant or threadgroup memory.

    The "(" at i opens its parameters. Plain clang has no such functions; the one for thread stays.
    """
    j = matching(tokens, i) + 1
    while j < len(tokens) and tokens[j].text in ("const", "volatile"):
        j += 1
    spaces = ("device", "constant", "threadgroup")
    if j + 1 >= len(tokens) or tokens[j].text not in spaces or tokens[j + 1].text not in "{;:":
        return None
    body = j + 1
    while (
        body < len(tokens) and tokens[body].text not in "{;"
    ):  # after a constructor's initializers
        body = matching(tokens, body) + 1 if tokens[body].text == "(" else body + 1
    begin = i
    while begin and tokens[begin - 1].text not in ("{", "}", ";"):
        if tokens[begin - 1].text == ":" and tokens[begin - 2].text in _ACCESS:
            break
        begin -= 1
    end = matching(tokens, body) if tokens[body].text == "{" else body
    return Edit(tokens[begin].at, tokens[end].end, "")


def _vector_words(tokens: list[Token], i: int) -> list[Edit]:
    """float4(…), (float4)x, static_cast<float4>(x), vec<T, 4>(…) become construct<…>(…)."""
    token = tokens[i]
    if token.text == "static_cast" and i + 1 < len(tokens) and tokens[i + 1].text == "<":
        end = closing_angle(tokens, i + 1)
        if _is_vector(tokens[i + 2 : end]):
            return [Edit(token.at, token.end, "::metal::construct")]
        return []
    end = _vector_end(tokens, i)
    if end == 0 or (i and tokens[i - 1].text in ("<", ",") and tokens[end].text in (">", ",")):
        return []
    name = " ".join(t.text for t in tokens[i:end])
    while i > 1 and tokens[i - 1].text == "::" and tokens[i - 2].text in ("metal", "::"):
        i -= 2  # metal::float4(…)
    if i and tokens[i - 1].text == "::":
        i -= 1
    if tokens[end].text == "(" and not _declarator(tokens, end):
        return [Edit(tokens[i].at, tokens[end - 1].end, f"::metal::construct<{name}>")]
    cast = i > 0 and tokens[i - 1].text == "(" and tokens[end].text == ")"
    if cast and end + 1 < len(tokens) and not _is_call(tokens, i - 2):
        last = _unary_end(tokens, end + 1)
        if last > end:
            return [
                Edit(tokens[i - 1].at, tokens[end].end, f"::metal::construct<{name}>("),
                Edit(tokens[last].end, tokens[last].end, ")"),
            ]
    return []


def _logger(tokens: list[Token], i: int) -> list[Edit]:
    """os_log name("…", "…") gets braces: it is an aggregate here (csrc/msl/host/logging.h)."""
    if tokens[i].text != "os_log" or i + 2 >= len(tokens) or tokens[i + 2].text != "(":
        return []
    opening, closing = tokens[i + 2], tokens[matching(tokens, i + 2)]
    return [Edit(t.at, t.end, brace) for t, brace in ((opening, "{"), (closing, "}"))]


def _pointer_cast(tokens: list[Token], i: int) -> list[Edit]:
    """(device T*)x and reinterpret_cast<device T*>(x) become cast_pointer<device T*>(x)."""
    if tokens[i].text == "reinterpret_cast":
        end = closing_angle(tokens, i + 1)
        if end < len(tokens) and tokens[end - 1].text == "*":
            return [Edit(tokens[i].at, tokens[i].end, "::metal::emulator::cast_pointer")]
    if tokens[i].text != "(" or tokens[i + 1].kind != "word":
        return []
    close = i + 1  # the end of a short run of words
    while close < len(tokens) and (
        tokens[close].kind == "word" or tokens[close].text in ("*", "::", "<", ">", ",")
    ):
        close += 1
    if not is_pointer_cast(tokens, i, close):
        return []
    last = _unary_end(tokens, close + 1)
    if last <= close or _is_member(tokens[close + 1 : last + 1]):
        return []
    type_ = " ".join(t.text for t in tokens[i + 1 : close])
    return [
        Edit(tokens[i].at, tokens[close].end, f"::metal::emulator::cast_pointer<{type_}>("),
        Edit(tokens[last].end, tokens[last].end, ")"),
    ]


def _is_member(operand: list[Token]) -> bool:
    """Whether `operand` is a member: clang knows its alignment, and a call would hide it."""
    depth = 0
    for token in operand:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.text, 0)
        if depth == 0 and token.text in (".", "->"):
            return True
    return False


def _is_vector(tokens: list[Token]) -> bool:
    return _vector_end(tokens + [Token("punct", ">", 0)], 0) == len(tokens)


def _vector_end(tokens: list[Token], i: int) -> int:
    """The index after the vector type that begins at i; 0 if none does."""
    if i and tokens[i - 1].text == "operator":
        return 0
    if i and tokens[i - 1].text in ("::", ".", "->") and tokens[max(i - 2, 0)].text != "metal":
        return 0
    if tokens[i].text in VECTORS and i + 1 < len(tokens):
        return i + 1
    if tokens[i].text == "vec" and i + 1 < len(tokens) and tokens[i + 1].text == "<":
        end = closing_angle(tokens, i + 1) + 1
        return end if end < len(tokens) else 0
    return 0


def _declarator(tokens: list[Token], i: int) -> bool:
    """Whether the "(" at i begins a declarator: float4 (&a)[2], float4 (*f)(int)."""
    if tokens[i + 1].text not in ("&", "*") or i + 3 >= len(tokens):
        return False
    close = matching(tokens, i)
    return close == i + 3 and close + 1 < len(tokens) and tokens[close + 1].text in ("[", "(")


def _is_call(tokens: list[Token], i: int) -> bool:
    """Whether a "(" after tokens[i] opens arguments: f(float4), sizeof(float4)."""
    if i < 0:
        return False
    t = tokens[i]
    return t.text in (")", "]", ">") or (t.kind == "word" and t.text not in ("return", "case"))


def _unary_end(tokens: list[Token], i: int) -> int:
    """The index of the last word of the unary expression that begins at i; i - 1 if none does."""
    start = i
    while i < len(tokens) and tokens[i].text in _UNARY:
        i += 1
    if i >= len(tokens):
        return start - 1
    if tokens[i].text == "(":
        i = matching(tokens, i)
        if i + 1 < len(tokens) and tokens[i + 1].kind in ("word", "number"):
            return _unary_end(tokens, i + 1)  # another cast
        if i + 1 < len(tokens) and tokens[i + 1].text == "(":
            return _unary_end(tokens, i + 1)
        if i + 1 < len(tokens) and tokens[i + 1].text == "*" and tokens[i - 1].text == "*":
            return _unary_end(tokens, i + 1)
    elif tokens[i].kind not in ("word", "number"):
        return start - 1
    while i + 1 < len(tokens):
        text = tokens[i + 1].text
        if text in ("(", "["):
            i = matching(tokens, i + 1)
        elif text in (".", "->", "::"):
            i += 2
        elif text == "<" and _calls_template(tokens, i + 1):
            i = closing_angle(tokens, i + 1)
        else:
            break
    return i


def _calls_template(tokens: list[Token], i: int) -> bool:
    """Whether the "<" at i opens the arguments of a template function that is called."""
    end = closing_angle(tokens, i)
    return end + 1 < len(tokens) and tokens[end + 1].text == "("

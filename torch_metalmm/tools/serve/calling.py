"""Calls of functions: which may come, whether one must, and the forms of their arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from .errors import unsupported, wrong

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Between the parts of JSON, as json.dumps writes them: where white space is free, a small model may
# write nothing else.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Wanted:
    """The form that an answer has: what the field asks for.

    calls: a grammar for what follows each mark of a call, the rest is free.
    """

    field: str
    kind: Literal["json", "regex", "grammar", "calls"]
    text: str  # a JSON schema, a regular expression, a grammar in Lark's syntax


@dataclass(frozen=True)
class Calls:
    """The functions of a request, and how they may be called."""

    tools: list[dict[str, Any]] | None  # tools that the chat template is told of
    functions: list[dict[str, Any]]  # functions that may be called
    is_forced: bool  # whether the answer must be a call
    are_many: bool  # whether more than one may come

    def form(self) -> Wanted | None:
        """The form of the call that must come, or of calls that may, if one of them is strict."""
        if self.is_forced:
            return Wanted("tool_choice", "grammar", _grammar(self.functions, is_forced=True))
        if any(function.get("strict") is True for function in self.functions):
            return Wanted("tools", "calls", _grammar(self.functions, is_forced=False))
        return None


def calls_of(tools: Any, choice: Any, are_many: bool) -> Calls:
    """The fields tools, tool_choice, parallel_tool_calls. ApiError 400: one is malformed."""
    functions = [] if tools is None else _functions(tools)
    if choice == "none" or (choice in (None, "auto") and not functions):
        return Calls(None, [], False, are_many)
    if choice in (None, "auto"):
        return Calls(tools, functions, False, are_many)
    named = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(named, dict) and choice.get("type") == "function":
        functions = [one for one in functions if one["name"] == named.get("name")]
    elif choice != "required":
        raise unsupported("tool_choice", "must be none, auto, required, or the name of a function")
    if not functions:
        raise wrong("tool_choice", "no such function is in tools")
    return Calls(tools, functions, True, False)


def _functions(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise wrong("tools", "must be a list of objects")
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise wrong("tools", "must be a list of objects, each with a function that has a name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise wrong("tools", f"the parameters of {name} must be a schema")
        found.append(function)
    return found


def _grammar(functions: list[dict[str, Any]], is_forced: bool) -> str:
    """The grammar of one call as JSON, for Lark. is_forced: by schemas that are not strict, too."""
    rules = []
    for i, function in enumerate(functions):
        schema: dict[str, Any] = {}
        if is_forced or function.get("strict") is True:
            schema = function.get("parameters") or {"additionalProperties": False}
        text = schema_text({**schema, "type": "object", "x-guidance": SPACING}, "tools")
        begin = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
        rules.append(f'call{i}: {begin} arguments{i} "}}"\narguments{i}: %json {text}')
    start = " | ".join(f"call{i}" for i in range(len(functions)))
    # A model writes a line's end between its mark and a call.
    return f'start: {"" if is_forced else "LINE? "}({start})\nLINE: "\\n"\n' + "\n".join(rules)


def schema_text(schema: dict[str, Any], field: str) -> str:
    """ApiError: an integer that llguidance, which reads numbers as f64, would change; too deep."""

    def checked(digits: str) -> int:
        if abs(number := int(digits)) > 1 << 53:
            raise wrong(field, f"{number} in the schema; integers are at most 2^53")
        return number

    try:
        text = json.dumps(schema)
        json.loads(text, parse_int=checked)
    except RecursionError:
        raise wrong(field, "a schema of too many levels") from None
    return text

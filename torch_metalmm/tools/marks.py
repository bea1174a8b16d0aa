"""Text that comes in pieces: thoughts and tool calls in it, and the strings that end it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """The texts that open and close a part of an answer; closes None: the answer's end."""

    opens: str
    closes: str | None
    kind: str


TEXT, THOUGHT, CALL = "text", "thought", "call"
MARKS = (
    Mark("<think>", "</think>", THOUGHT),
    Mark("<tool_call>", "</tool_call>", CALL),  # Hermes, Qwen, SmolLM3, Granite
    Mark("[TOOL_CALLS]", None, CALL),  # Mistral
    Mark("<|python_tag|>", None, CALL),  # Llama 3.1
)
# Tokens that a tokenizer may call special, and that belong to the answer.
KEPT = frozenset(text for mark in MARKS for text in (mark.opens, mark.closes) if text)


def held_back(text: str, wanted: Iterable[str]) -> int:
    """How many characters at the end of the text may begin one of the wanted strings."""
    most = 0
    for want in wanted:
        for length in range(min(len(want) - 1, len(text)), most, -1):
            if text.endswith(want[:length]):
                most = length
                break
    return most


class Stops:
    """Text up to the first of some strings, whichever pieces it comes in."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self.found = ""  # the first of them that came
        self._rest = ""

    def feed(self, piece: str) -> str:
        """The text that is certain to come before a stop string."""
        if self.found:
            return ""
        self._rest += piece
        places = [(i, text) for text in self.strings if (i := self._rest.find(text)) >= 0]
        if places:
            place, self.found = min(places)
            return self._take(place)
        return self._take(len(self._rest) - held_back(self._rest, self.strings))

    def end(self) -> str:
        """The text that was held back, where no stop string came of it."""
        return "" if self.found else self._take(len(self._rest))

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def opened_by(prompt: str, marks: Iterable[Mark] = MARKS) -> Mark | None:
    """The mark that the prompt ends with, as those of Qwen3 thinking do."""
    return next((mark for mark in marks if prompt.rstrip().endswith(mark.opens)), None)


class Splitter:
    """An answer as (kind, text), without the marks, whichever pieces it comes in; calls whole."""

    def __init__(self, prompt: str = "", marks: Sequence[Mark] = MARKS, kind: str = TEXT) -> None:
        """prompt: may end with the mark that opens the answer. marks: those that are looked for;
        others stay in the text. kind: of what no mark opens."""
        self._open, self._marks, self._kind = opened_by(prompt, marks), marks, kind
        self._rest = ""
        self._read = 0  # characters before the rest
        self.first_call: int | None = None  # where the mark of the first call begins

    def feed(self, piece: str) -> Iterator[tuple[str, str]]:
        self._rest += piece
        while self._rest:
            kind = self._open.kind if self._open else self._kind
            place, mark = self._next()
            if mark is None:
                if kind != CALL:
                    yield from self._take(kind, place, 0)
                return
            if self._open is None and mark.kind == CALL and self.first_call is None:
                self.first_call = self._read + place
            yield from self._take(kind, place, len(mark.closes or "" if self._open else mark.opens))
            self._open = None if self._open else mark

    def end(self) -> Iterator[tuple[str, str]]:
        """The text that was held back for a mark that did not come."""
        kind = self._open.kind if self._open else self._kind
        yield from self._take(kind, len(self._rest), 0)

    def _next(self) -> tuple[int, Mark | None]:
        """(how much comes before the next mark, that mark), or (how much is certain, None)."""
        rest = self._rest
        if self._open is not None:
            closes = self._open.closes
            if closes is None:
                return len(rest), None
            place = rest.find(closes)
            return (
                (place, self._open)
                if place >= 0
                else (len(rest) - held_back(rest, (closes,)), None)
            )
        found = [(rest.find(mark.opens), mark) for mark in self._marks if mark.opens in rest]
        if found:
            return min(found, key=lambda pair: pair[0])
        return len(rest) - held_back(rest, [mark.opens for mark in self._marks]), None

    def _take(self, kind: str, count: int, mark: int) -> Iterator[tuple[str, str]]:
        taken, self._rest = self._rest[:count], self._rest[count + mark :]
        self._read += count + mark
        if taken:
            yield kind, taken


def parts(text: str, prompt: str = "") -> list[tuple[str, str]]:
    """A whole answer as (kind, text)."""
    splitter = Splitter(prompt)
    return [*splitter.feed(text), *splitter.end()]


def calls_of(text: str) -> list[dict[str, Any]] | None:
    """[{"name", "arguments"}] of what stands between the marks of a call; None: no such JSON."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = []
    for call in given if isinstance(given, list) else [given]:
        arguments = (
            call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        )
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return None
        found.append({"name": call["name"], "arguments": arguments})
    return found or None


def assistant_message(
    text: str, takes_calls: bool, prompt: str = "", place: int = 0
) -> dict[str, Any]:
    """The assistant's message of an answer. takes_calls: the template writes `tool_calls`.

    prompt: as Splitter's. place: that of the message in its chat, which makes the ids of its calls
    unique there; they are 9 letters or digits, as Mistral's templates demand. Calls that are no
    JSON, and those of other templates, stay in the content as they came.
    """
    splitter = Splitter(prompt)
    calls: list[dict[str, Any]] = []
    for kind, part in [*splitter.feed(text), *splitter.end()]:
        if kind == CALL:
            found = calls_of(part)
            if found is None:
                return {"role": "assistant", "content": text}
            calls += found
    if not calls or not takes_calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text[: splitter.first_call].rstrip(),
        "tool_calls": [
            {"type": "function", "id": f"{place:06}{i:03}", "function": call}
            for i, call in enumerate(calls)
        ],
    }

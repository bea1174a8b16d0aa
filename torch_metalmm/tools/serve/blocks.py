"""The common part of Anthropic's API and OpenAI's of responses: answers as blocks, not choices."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from ..marks import TEXT, THOUGHT
from ..writing import Finish
from .errors import unsupported, wrong
from .replies import EVENTS, Choice, Object
from .schema import warn_once
from .weights import Scored


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class BlockReply:
    """A Reply of one choice, whose thoughts, texts and calls come one after the other."""

    media_type = EVENTS

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.blocks: list[Object] = []
        self._open: str | None = None  # the kind of the last block, if it still grows
        self._space = ("", "")  # a kind, and space that begins no block by itself

    def feed(self, _: int, came: str | Scored | Finish) -> Iterator[str]:
        for piece in self._choice.feed(came):
            yield from self._grown(THOUGHT, piece.thought)
            yield from self._grown(TEXT, piece.text)
            for call in piece.calls:
                yield from self.closed()
                yield from self.called(call)

    def closed(self) -> Iterator[str]:
        """The end of the block that grows."""
        if self._open is not None:
            yield from self.end(self._open)
        self._open = None

    def _grown(self, kind: str, text: str) -> Iterator[str]:
        if self._open != kind:
            before, space = self._space
            text = space + text if before == kind else text
            if not text.strip():
                self._space = (kind, text) if text else self._space
                return
            yield from self.closed()
            self._open, self._space = kind, ("", "")
            yield from self.begin(kind)
        if text:
            yield from self.grow(kind, text)

    # ---- what the API says

    def begin(self, kind: str) -> Iterator[str]:
        raise NotImplementedError

    def grow(self, kind: str, text: str) -> Iterator[str]:
        raise NotImplementedError

    def end(self, kind: str) -> Iterator[str]:
        raise NotImplementedError

    def called(self, call: Object) -> Iterator[str]:
        raise NotImplementedError


def objects(given: Any, field: str) -> list[Object]:
    """ApiError 400: it is no list of objects."""
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise wrong(field, "must be a list of objects")
    return given


def text_of(content: Any, kinds: tuple[str, ...], field: str) -> str:
    """The text of a string, or of parts of these kinds. ApiError 400: `content` is neither."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in objects(content, field):
        text = part.get("text")
        if part.get("type") not in kinds or not isinstance(text, str):
            raise unsupported(field, f"parts must be texts of type {', '.join(kinds)}")
        texts.append(text)
    return "\n".join(texts)


def functions_of(tools: Any, schema: str) -> list[Object] | None:
    """Tools as chats have them. schema: the field that has the one of a function's arguments.

    Those that a service would run itself, as a search, are left out: no answer need call them.
    """
    if tools is None:
        return None
    found = []
    for tool in objects(tools, "tools"):
        if tool.get("type") not in (None, "custom", "function") or tool.get("format"):
            warn_once("tools: those that are no functions are left out")
            continue
        names = ("name", "description", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        parameters = tool.get(schema) or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": {**function, "parameters": parameters}})
    return found

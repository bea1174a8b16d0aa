"""Answers in the shape of OpenAI's API, whole and in pieces."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

from ..chat.marks import CALL, MARKS, TEXT, THOUGHT, Splitter, calls_of, opened_by
from .calling import Calls
from .engine import Finish
from .errors import ApiError
from .weights import Scored

Object = dict[str, Any]
Spell = Callable[[int], str]  # a token's addition to a text; "" if it is never shown


class Reply(Protocol):
    """An answer to a request: events of a stream as they come, or all of it at the end."""

    media_type: str  # a stream's media type

    def first(self) -> Iterator[str]: ...
    def feed(self, index: int, came: str | Scored | Finish) -> Iterator[str]: ...
    def last(self) -> Iterator[str]: ...
    def failed(self, error: ApiError) -> str: ...
    def whole(self) -> Object: ...  # after the Finish of each choice


EVENTS = "text/event-stream"


def event(value: Object, kind: str | None = None) -> str:
    """A server-sent event."""
    head = "" if kind is None else f"event: {kind}\n"
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"


class Choices:
    """A Reply in OpenAI's shape, of one choice or several."""

    media_type = EVENTS

    def __init__(
        self, model: str, choices: list[CompletionReply], per_prompt: int, tells_usage: bool
    ) -> None:
        """choices: per_prompt of each prompt, one prompt's after the other's."""
        kind = choices[0]
        self._kind, self._chunk_kind = kind.kind, kind.chunk_kind
        self._head = {
            "id": kind.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }
        self._choices, self._per_prompt, self._tells_usage = choices, per_prompt, tells_usage

    def first(self) -> Iterator[str]:
        yield from self._events(chain(*(choice.first() for choice in self._choices)))

    def feed(self, index: int, came: str | Scored | Finish) -> Iterator[str]:
        yield from self._events(self._choices[index].feed(came))

    def last(self) -> Iterator[str]:
        if self._tells_usage:
            usage = {"choices": [], "usage": self._usage()}
            yield event({**self._head, "object": self._chunk_kind, **usage})
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        return event(error.body())

    def whole(self) -> Object:
        choices = [choice.whole() for choice in self._choices]
        rest = {"choices": choices, "usage": self._usage()}
        return {**self._head, "object": self._kind, **rest}

    def _events(self, choices: Iterable[Object]) -> Iterator[str]:
        for choice in choices:
            yield event({**self._head, "object": self._chunk_kind, "choices": [choice]})

    def _usage(self) -> Object:
        """A prompt of several choices is counted once."""
        ends = [choice.finish for choice in self._choices]
        prompts = ends[:: self._per_prompt]
        prompt, new = sum(e.prompt_tokens for e in prompts), sum(e.new_tokens for e in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(e.kept_tokens for e in prompts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(e.right_guesses for e in ends),
                "rejected_prediction_tokens": sum(e.wrong_guesses for e in ends),
            },
        }


class CompletionReply:
    """A choice of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, index: int, spell: Spell, before: str = "") -> None:
        """before: what the text begins with, before the answer."""
        self.finish = Finish("length", 0, 0, 0)
        self._index, self._spell, self._before = index, spell, before
        self._text = ""
        self._scored: list[Scored] = []  # scores of the pieces that are still to come
        self._all: list[Scored] = []
        self._offset = 0  # place of the next scored token in the text

    def first(self) -> Iterator[Object]:
        """The first objects of a stream."""
        if self._before:
            yield self._choice({"text": self._before, "logprobs": None})

    def feed(self, came: str | Scored | Finish) -> Iterator[Object]:
        """The chunks of a piece of the answer, which is kept for whole()."""
        if isinstance(came, Scored):
            if self._spell(came.token):
                self._scored.append(came)
                self._all.append(came)
        elif isinstance(came, Finish):
            self.finish = came
            yield from self._end()
        else:
            yield from self._piece(came)

    def whole(self) -> Object:
        self._offset = 0
        text = self._before + self._text
        return self._choice({"text": text, "logprobs": self._told(self._all)}, self.finish.reason)

    def _piece(self, piece: str) -> Iterator[Object]:
        self._text += piece
        yield self._chunk({"text": piece})

    def _end(self) -> Iterator[Object]:
        yield self._chunk({"text": ""}, self.finish.reason)

    def _chunk(self, part: Object, reason: str | None = None) -> Object:
        """With the scores of the tokens since the last one."""
        scored, self._scored = self._scored, []
        return self._choice({**part, "logprobs": self._told(scored)}, reason)

    def _choice(self, part: Object, reason: str | None = None) -> Object:
        return {"index": self._index, **part, "finish_reason": reason}

    def _told(self, scored: list[Scored]) -> Object | None:
        if not scored:
            return None
        found: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in scored:
            text = self._spell(one.token)
            # The likelier one of two tokens that read alike is kept.
            tops = {self._spell(token): share for token, share in reversed(one.top)}
            for name, value in zip(found, (text, one.share, tops, self._offset), strict=True):
                found[name].append(value)
            self._offset += len(text)
        return found


class ChatReply(CompletionReply):
    """A choice of /v1/chat/completions: thoughts and calls of functions apart from the text."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, index: int, spell: Spell, prompt: str, calls: Calls) -> None:
        """prompt: as Splitter's. Where no call may come, what looks like one is text."""
        super().__init__(index, spell)
        if calls.is_forced:  # a mark in the call's arguments is none
            marks = [m for m in [opened_by(prompt)] if m is not None and m.kind == THOUGHT]
        else:
            marks = [m for m in MARKS if calls.tools or m.kind != CALL]
        self._splitter = Splitter(prompt, marks)
        self._may = calls
        self._part = 0  # number of the part, of those that marks opened
        self.thought = ""
        self._call = ""  # the text of the calls so far
        self.calls: list[Object] = []

    def first(self) -> Iterator[Object]:
        yield self._choice({"delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def whole(self) -> Object:
        message: Object = {"role": "assistant", "content": self._text, "refusal": None}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["content"] = self._text.strip() or None
            message["tool_calls"] = self.calls
        return self._choice({"message": message, "logprobs": self._told(self._all)}, self.reason())

    def reason(self) -> str:
        reason = self.finish.reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _piece(self, piece: str) -> Iterator[Object]:
        yield from self._parts(self._splitter.feed(piece))

    def _end(self) -> Iterator[Object]:
        yield from self._parts(self._splitter.end())
        yield from self._called()
        yield self._chunk({"delta": {}}, self.reason())

    def _parts(self, parts: Iterator[tuple[str, str]]) -> Iterator[Object]:
        for kind, text in parts:
            if self._splitter.count != self._part:
                yield from self._called()
                self._part = self._splitter.count
            if kind == CALL or (kind == TEXT and self._may.is_forced):
                self._call += text
                continue
            yield from self._called()
            if kind == THOUGHT:
                self.thought += text
                yield self._chunk({"delta": {"reasoning_content": text}})
            else:
                self._text += text
                yield self._chunk({"delta": {"content": text}})

    def _called(self) -> Iterator[Object]:
        """The calls that are complete. What is none stays text."""
        text, self._call = self._call, ""
        if not text:
            return
        found = calls_of(text)
        if found is not None and not _is_writable(found):
            found = None
        if found is None:
            self._text += text
            yield self._chunk({"delta": {"content": text}})
        for call in found or []:
            if self.calls and not self._may.are_many:
                return
            made = {
                "id": uuid.uuid4().hex[:9],  # 9 letters or digits, as Mistral's templates demand
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            yield self._chunk({"delta": {"tool_calls": [{"index": len(self.calls), **made}]}})
            self.calls.append(made)

    def _told(self, scored: list[Scored]) -> Object | None:
        if not scored:
            return None

        def told(token: int, share: float) -> Object:
            text = self._spell(token)
            # A part of a character has bytes that no text tells.
            of_text = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
            return {"token": text, "logprob": share, "bytes": of_text}

        content = [
            told(one.token, one.share) | {"top_logprobs": [told(*pair) for pair in one.top]}
            for one in scored
        ]
        return {"content": content, "refusal": None}


def _is_writable(value: Any) -> bool:
    """Whether it is JSON, which has no NaN, and Unicode."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True

"""Answers in the shape of OpenAI's API, whole and in pieces."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from ..chat.marks import CALL, MARKS, THOUGHT, Splitter, calls_of
from .engine import Finish

Object = dict[str, Any]


def usage_of(finish: Finish) -> Object:
    guesses = {
        "accepted_prediction_tokens": finish.right_guesses,
        "rejected_prediction_tokens": finish.wrong_guesses,
    }
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.new_tokens,
        "total_tokens": finish.prompt_tokens + finish.new_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.kept_tokens},
        "completion_tokens_details": guesses,
    }


class CompletionReply:
    """Of /v1/completions."""

    _kind, _chunk_kind, _prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, model: str) -> None:
        self._head = {
            "id": self._prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }
        self._text = ""

    def first(self) -> Iterator[Object]:
        """What a stream begins with."""
        yield from ()

    def feed(self, piece: str) -> Iterator[Object]:
        """The chunks of a piece of the answer, which is kept for whole()."""
        self._text += piece
        yield self._chunk({"text": piece, "logprobs": None})

    def end(self, finish: Finish) -> Iterator[Object]:
        yield self._chunk({"text": "", "logprobs": None}, finish.reason)

    def usage(self, finish: Finish) -> Object:
        """The chunk after the last one, for those who ask."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": usage_of(finish)}

    def whole(self, finish: Finish) -> Object:
        return {
            **self._head,
            "object": self._kind,
            "choices": [self._choice({"text": self._text, "logprobs": None}, finish.reason)],
            "usage": usage_of(finish),
        }

    def _chunk(self, part: Object, reason: str | None = None) -> Object:
        return {**self._head, "object": self._chunk_kind, "choices": [self._choice(part, reason)]}

    def _choice(self, part: Object, reason: str | None) -> Object:
        return {"index": 0, **part, "finish_reason": reason}


class ChatReply(CompletionReply):
    """Of /v1/chat/completions: thoughts and calls of functions apart from the text."""

    _kind, _chunk_kind, _prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, model: str, prompt: str, takes_calls: bool) -> None:
        """prompt: as Splitter's. takes_calls: else what looks like a call is text."""
        super().__init__(model)
        marks = [mark for mark in MARKS if takes_calls or mark.kind != CALL]
        self._splitter = Splitter(prompt, marks)
        self._part = 0  # of those that marks opened
        self._thought = ""
        self._call = ""  # what came of the calls
        self._calls: list[Object] = []

    def first(self) -> Iterator[Object]:
        yield self._chunk({"delta": {"role": "assistant", "content": ""}})

    def feed(self, piece: str) -> Iterator[Object]:
        yield from self._parts(self._splitter.feed(piece))

    def end(self, finish: Finish) -> Iterator[Object]:
        yield from self._parts(self._splitter.end())
        yield from self._called()
        yield self._chunk({"delta": {}}, self._reason(finish))

    def whole(self, finish: Finish) -> Object:
        """After end()."""
        message: Object = {"role": "assistant", "content": self._text, "refusal": None}
        if self._thought:
            message["reasoning_content"] = self._thought
        if self._calls:
            message["content"] = self._text.strip() or None
            message["tool_calls"] = self._calls
        part = {"message": message, "logprobs": None}
        return {
            **self._head,
            "object": self._kind,
            "choices": [self._choice(part, self._reason(finish))],
            "usage": usage_of(finish),
        }

    def _reason(self, finish: Finish) -> str:
        return "tool_calls" if self._calls and finish.reason == "stop" else finish.reason

    def _parts(self, parts: Iterator[tuple[str, str]]) -> Iterator[Object]:
        for kind, text in parts:
            if self._splitter.count != self._part:
                yield from self._called()
                self._part = self._splitter.count
            if kind == CALL:
                self._call += text
                continue
            yield from self._called()
            if kind == THOUGHT:
                self._thought += text
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
            made = {
                "id": uuid.uuid4().hex[:9],  # 9 letters or digits, as Mistral's templates demand
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            yield self._chunk({"delta": {"tool_calls": [{"index": len(self._calls), **made}]}})
            self._calls.append(made)


def _is_writable(value: Any) -> bool:
    """Whether it is JSON, which has no NaN, and Unicode."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True

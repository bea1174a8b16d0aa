"""Answers in pieces, and in the shape of OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from ..marks import CALL, MARKS, TEXT, THOUGHT, Splitter, calls_of, opened_by
from ..writing import Finish
from .calling import Calls
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


class Piece(NamedTuple):
    """A part of an answer, or all of it. reason: how it ended, in the last part."""

    text: str = ""
    thought: str = ""
    calls: list[Object] = []
    scored: list[Scored] = []
    reason: str | None = None

    @property
    def content(self) -> str:
        """The text, without the space around calls."""
        return self.text.strip() if self.calls else self.text


class Choice:
    """An answer in pieces: thoughts and calls of functions apart from the text.

    prompt: as Splitter's. Where no call may come, what looks like one is text; calls None: so is
    what looks like a thought. before: what the text begins with, before the answer.
    """

    def __init__(
        self, spell: Spell, prompt: str = "", calls: Calls | None = None, before: str = ""
    ) -> None:
        self.spell, self.before = spell, before
        self.finish = Finish("length", 0, 0, 0)
        self._pieces: list[Piece] = []
        self.calls: list[Object] = []  # of all pieces
        self._may = calls or Calls(None, [], is_forced=False, are_many=False)
        if self._may.is_forced:  # a mark in the call's arguments is none
            marks = [m for m in [opened_by(prompt)] if m is not None and m.kind == THOUGHT]
        else:
            marks = [m for m in MARKS if calls and (calls.tools or m.kind != CALL)]
        self._splitter = Splitter(prompt, marks, CALL if self._may.is_forced else TEXT)
        self._scored: list[Scored] = []  # scores of the pieces that are still to come

    def feed(self, came: str | Scored | Finish) -> Iterator[Piece]:
        """The pieces that the next part of an answer completes."""
        if isinstance(came, Scored):
            if self.spell(came.token):
                self._scored.append(came)
        elif isinstance(came, Finish):
            self.finish = came
            yield from self._parts(self._splitter.end())
            has_called = self.calls and came.reason == "stop"
            yield self._piece(reason="tool_calls" if has_called else came.reason)
        else:
            yield from self._parts(self._splitter.feed(came))

    def _piece(self, **fields: Any) -> Piece:
        """With the scores of the tokens since the last one."""
        piece, self._scored = Piece(scored=self._scored, **fields), []
        self._pieces.append(piece)
        self.calls += piece.calls
        return piece

    @property
    def whole(self) -> Piece:
        """All pieces as one."""
        text, thought = ("".join(getattr(p, n) for p in self._pieces) for n in ("text", "thought"))
        scored = [one for p in self._pieces for one in p.scored]
        return Piece(
            text, thought, self.calls, scored, self._pieces[-1].reason if self._pieces else None
        )

    def _parts(self, parts: Iterator[tuple[str, str]]) -> Iterator[Piece]:
        for kind, text in parts:
            if kind == CALL:
                yield from self._called(text)
            else:
                yield self._piece(**{"thought" if kind == THOUGHT else "text": text})

    def _called(self, text: str) -> Iterator[Piece]:
        """The calls that the text is. What is none stays text."""
        found = calls_of(text)
        if found is None or not _is_writable(found):
            yield self._piece(text=text)
            return
        for call in found:
            if self.calls and not self._may.are_many:
                return
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            id = uuid.uuid4().hex[:9]  # 9 letters or digits, as Mistral's templates demand
            function = {"name": call["name"], "arguments": arguments}
            yield self._piece(calls=[{"id": id, "type": "function", "function": function}])


class Choices:
    """A Reply in the shape of OpenAI's completions, of one choice or several."""

    media_type = EVENTS
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(
        self, model: str, choices: list[Choice], per_prompt: int, tells_usage: bool
    ) -> None:
        """choices: per_prompt of each prompt, one prompt's after the other's."""
        self._head = {
            "id": self.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }
        self._choices, self._per_prompt, self._tells_usage = choices, per_prompt, tells_usage
        self._offsets = [0] * len(choices)  # place of the next scored token in each text

    def first(self) -> Iterator[str]:
        for i, choice in enumerate(self._choices):
            if choice.before:
                yield self._event(self._choice(i, {"text": choice.before}, Piece()))

    def feed(self, index: int, came: str | Scored | Finish) -> Iterator[str]:
        for piece in self._choices[index].feed(came):
            yield self._event(self._choice(index, self._chunk(index, piece), piece))

    def last(self) -> Iterator[str]:
        if self._tells_usage:
            usage = {"choices": [], "usage": self._usage()}
            yield event({**self._head, "object": self.chunk_kind, **usage})
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        return event(error.body())

    def whole(self) -> Object:
        self._offsets = [0] * len(self._choices)
        wholes = [choice.whole for choice in self._choices]
        found = [self._choice(i, self._all(i, whole), whole) for i, whole in enumerate(wholes)]
        return {**self._head, "object": self.kind, "choices": found, "usage": self._usage()}

    def _chunk(self, index: int, piece: Piece) -> Object:
        """The fields of a choice's piece."""
        return {"text": piece.text}

    def _all(self, index: int, whole: Piece) -> Object:
        """The fields of the whole choice."""
        return {"text": self._choices[index].before + whole.text}

    def _scores(self, index: int, scored: list[Scored]) -> Object:
        spell, offset = self._choices[index].spell, self._offsets[index]
        found: Object = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in scored:
            text = spell(one.token)
            # The likelier one of two tokens that read alike is kept.
            tops = {spell(token): share for token, share in reversed(one.top)}
            for name, value in zip(found, (text, one.share, tops, offset), strict=True):
                found[name].append(value)
            offset += len(text)
        self._offsets[index] = offset
        return found

    def _choice(self, index: int, told: Object, piece: Piece) -> Object:
        scores = self._scores(index, piece.scored) if piece.scored else None
        return {"index": index, **told, "logprobs": scores, "finish_reason": piece.reason}

    def _event(self, choice: Object) -> str:
        return event({**self._head, "object": self.chunk_kind, "choices": [choice]})

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


class ChatChoices(Choices):
    """A Reply in the shape of OpenAI's chats."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def first(self) -> Iterator[str]:
        for i in range(len(self._choices)):
            opening = {"delta": {"role": "assistant", "content": ""}}
            yield self._event(self._choice(i, opening, Piece()))

    def _chunk(self, index: int, piece: Piece) -> Object:
        before = len(self._choices[index].calls) - len(piece.calls)
        calls = [{"index": before + i, **call} for i, call in enumerate(piece.calls)]
        told = {"reasoning_content": piece.thought, "content": piece.text, "tool_calls": calls}
        return {"delta": {name: value for name, value in told.items() if value}}

    def _all(self, index: int, whole: Piece) -> Object:
        message: Object = {"role": "assistant", "content": whole.content, "refusal": None}
        if whole.thought:
            message["reasoning_content"] = whole.thought
        if whole.calls:
            message |= {"content": whole.content or None, "tool_calls": whole.calls}
        return {"message": message}

    def _scores(self, index: int, scored: list[Scored]) -> Object:
        return {"content": scores_of(scored, self._choices[index].spell), "refusal": None}


def scores_of(scored: list[Scored], spell: Spell) -> list[Object]:
    """In the words of OpenAI's chats."""

    def told(token: int, share: float) -> Object:
        text = spell(token)
        # A part of a character has bytes that no text tells.
        of_text = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
        return {"token": text, "logprob": share, "bytes": of_text}

    return [
        told(one.token, one.share) | {"top_logprobs": [told(*pair) for pair in one.top]}
        for one in scored
    ]


def _is_writable(value: Any) -> bool:
    """Whether it is JSON, which has no NaN, and Unicode."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True

"""An answer: its tokens as text, as they come; and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .marks import KEPT, Stops

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are not yet a character


@dataclass
class Answer:
    """The text and tokens that came, and the time they took."""

    text: str
    finish: str  # stop, length or interrupted
    prompt_tokens: int
    kept_tokens: int  # tokens of the prompt, read for an earlier answer
    new_tokens: int
    begun: float
    times: list[float]  # when each token came


class Stream:
    """A streamer, which generate() of transformers calls for each token.

    show is called with each piece of text that is certain: whole characters, and nothing of a stop
    string. Special tokens are left out, but for those that mark a part of the answer.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[str], show: Callable[[str], object]) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []  # when tokens came, of several at once the same time for each
        self.text = ""
        self.stops = Stops(stops)
        self._show, self._tokenizer = show, tokenizer
        self._hidden = hidden_tokens(tokenizer)
        self._seen: list[int] = []  # the tokens that are shown
        self._from = self._to = 0  # in _seen: where decoding begins, and where the part told ends
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        ids = value.flatten().tolist()
        self.ids += ids
        self.times += [time.perf_counter()] * len(ids)
        self._seen += [token for token in ids if token not in self._hidden]
        # Decoded with the tokens before: whether a space comes first depends on them.
        told, now = self._decode(self._to), self._decode(None)
        if len(now) > len(told) and not now.endswith(_UNFINISHED):
            self._tell(self.stops.feed(now[len(told) :]))
            self._from, self._to = self._to, len(self._seen)

    def end(self) -> None:
        """generate() is done; finish() comes later, also where it was interrupted."""

    def finish(self) -> None:
        """Tell what was held back. Bytes that became no character are dropped."""
        told, now = self._decode(self._to), self._decode(None).rstrip(_UNFINISHED)
        if len(now) > len(told):
            self._tell(self.stops.feed(now[len(told) :]))
        self._tell(self.stops.end())

    def _decode(self, end: int | None) -> str:
        return str(
            self._tokenizer.decode(self._seen[self._from : end], clean_up_tokenization_spaces=False)
        )

    def _tell(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._show(piece)


def hidden_tokens(tokenizer: Any) -> set[int]:
    """The special tokens that are no part of an answer's text."""
    added = tokenizer.added_tokens_decoder.items()
    special = {id for id, token in added if token.special and token.content not in KEPT}
    return special | {
        id
        for id, text in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        if text not in KEPT
    }

"""One answer under `generate`, `chat` and `serve`: its tokens, their text, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .marks import KEPT, Stops

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are not yet a character


def never() -> bool:
    return False


@dataclass
class Options:
    """How tokens are chosen, and how many. None: what the model's generation config says."""

    temperature: float = 0.0  # 0: the most likely token
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    stops: list[str] = field(default_factory=list)
    max_new_tokens: int | None = None  # None: as many as the context has room for
    context: int | None = None  # None: the model's
    form: Callable[[Tensor, Tensor], Tensor] | None = None  # leaves out tokens, for one answer
    bias: Callable[[Tensor, Tensor], Tensor] | None = None  # changes their logits
    scores: Callable[[int, Tensor], object] | None = None  # gets each token, and all logits there

    def own_processors(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """The processors that transformers has not."""
        return [one for one in (self.bias, self.form) if one is not None]


class Finish(NamedTuple):
    """The end of an answer, and what it took."""

    reason: str  # stop, length or interrupted
    prompt_tokens: int
    kept_tokens: int  # tokens of the prompt, read for an earlier answer
    new_tokens: int
    right_guesses: int = 0  # new tokens computed in a step with others before them
    wrong_guesses: int = 0
    stop: str = ""  # the string that ended it


class Writing:
    """tokens: of the prompt, then those of the answer. A streamer, too, which generate() calls.

    show is called with each piece of text that is certain: whole characters, and nothing of a stop
    string. Special tokens are left out, but for those that mark a part of the answer.
    """

    result: Finish  # once the answer is finished

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        ids: list[int],
        options: Options,
        show: Callable[[str], object],
        is_over: Callable[[], bool] = never,
    ) -> None:
        """options: max_new_tokens is a number. is_over: whether nobody waits for more."""
        self.tokens, self._count, self._most = list(ids), len(ids), options.max_new_tokens or 0
        self.begun = time.perf_counter()
        self.times: list[float] = []  # when tokens came, of several at once the same time for each
        self.text = ""
        self.stops = Stops(options.stops)
        self.is_prompt_next = False  # which transformers' loop tells first
        self._ends, self._is_over = end_tokens(model), is_over
        self._show, self._tokenizer = show, tokenizer
        self._hidden = hidden_tokens(tokenizer)
        self._seen: list[int] = []  # the tokens that are shown
        self._from = self._to = 0  # in _seen: where decoding begins, and where the part told ends

    @property
    def new(self) -> list[int]:
        """The answer's tokens."""
        return self.tokens[self._count :]

    def left(self) -> int:
        """Tokens that may still come."""
        return self._most - (len(self.tokens) - self._count)

    def reason(self) -> str:
        """How the answer has ended; "": it goes on."""
        is_begun = len(self.tokens) > self._count
        if self.stops.found or (is_begun and self.tokens[-1] in self._ends):
            return "stop"
        if self._is_over():
            return "interrupted"
        return "" if self.left() > 0 else "length"

    def put(self, value: Tensor) -> None:
        """What generate() tells."""
        if self.is_prompt_next:
            self.is_prompt_next = False
            return
        self.add(value.flatten().tolist())

    def end(self) -> None:
        """generate() is done; finish() comes later, also where it was interrupted."""

    def add(self, ids: list[int]) -> None:
        """The answer's next tokens."""
        self.tokens += ids
        self.times += [time.perf_counter()] * len(ids)
        self._seen += [token for token in ids if token not in self._hidden]
        # Decoded with the tokens before: whether a space comes first depends on them.
        told, now = self._decode(self._to), self._decode(None)
        if len(now) > len(told) and not now.endswith(_UNFINISHED):
            self._tell(self.stops.feed(now[len(told) :]))
            self._from, self._to = self._to, len(self._seen)

    def finish(self, reason: str, kept: int = 0, right: int = 0, wrong: int = 0) -> Finish:
        """Tell what was held back. Bytes that became no character are dropped."""
        told, now = self._decode(self._to), self._decode(None).rstrip(_UNFINISHED)
        if len(now) > len(told):
            self._tell(self.stops.feed(now[len(told) :]))
        self._tell(self.stops.end())
        counts = self._count, kept, len(self.tokens) - self._count, right, wrong
        self.result = Finish(reason, *counts, self.stops.found)
        return self.result

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


def end_tokens(model: Any) -> tuple[int, ...]:
    found = model.generation_config.eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)

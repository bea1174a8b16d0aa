"""The form of an answer: JSON of a schema, text of a regular expression or of a grammar.

llguidance says which tokens may come next: it has one wheel for every Python on Linux and macOS.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..chat.marks import THOUGHT, opened_by
from ..chat.session import end_tokens
from .errors import ApiError
from .schema import Wanted

# Between the parts of JSON, as json.dumps writes them: where white space is free, a small model may
# write nothing else.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Forms:
    """Those of one model's answers; from the threads of requests."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer, self._ends = tokenizer, end_tokens(model)
        rows = model.config.get_text_config(decoder=True).vocab_size
        self._vocabulary = max(rows, len(tokenizer))
        self._lock = threading.Lock()

    @cached_property
    def _tokens(self) -> Any:
        """A second for a large vocabulary: made when a request first has a form."""
        from llguidance.hf import from_tokenizer

        ends = [*self._ends] or None
        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)

    def of(self, wanted: Wanted, prompt: str, count: int) -> Form:
        """For the answer to a prompt of `count` tokens. ApiError 400: the form is none."""
        from llguidance import LLMatcher

        try:
            with self._lock:
                tokens = self._tokens
        except ValueError as error:  # of a tokenizer of another kind
            raise ApiError(400, f"{wanted.field}: {error}", wanted.field, "unsupported") from None
        if wanted.kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(wanted.text, overrides=_JSON)
        elif wanted.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(wanted.text)
        else:
            grammar = LLMatcher.grammar_from_lark(wanted.text)
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            said = matcher.get_error().partition("\n")[0][:300]
            raise ApiError(400, f"{wanted.field}: {said}", wanted.field)
        mark = opened_by(prompt)
        after = mark.closes if mark is not None and mark.kind == THOUGHT else None
        return Form(matcher, count, self._tokenizer, after)


class Form:
    """A processor of logits, as transformers' own: of one answer, after each of its tokens."""

    def __init__(self, matcher: Any, count: int, tokenizer: Any, after: str | None = None) -> None:
        """count: tokens before the answer. after: what ends the thought that the prompt opens,
        which is free."""
        self._matcher, self._count, self._tokenizer, self._after = matcher, count, tokenizer, after
        self._thought: list[int] = []

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """ids: [1, tokens so far], logits: [1, vocabulary], -inf where no answer of the form goes
        on. RuntimeError: the form is beyond llguidance's limits."""
        new = ids[0, self._count :].tolist()
        self._count += len(new)
        for token in new:
            self._take(token)
        if self._after is not None:
            return logits
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(f"the form of the answer: {self._matcher.get_error()}")
        bits = np.unpackbits(allowed, count=logits.shape[-1], bitorder="little")
        return logits.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)

    def _take(self, token: int) -> None:
        if self._after is None:
            self._matcher.consume_token(token)
            return
        self._thought.append(token)
        if self._after in self._tokenizer.decode(self._thought[-16:]):
            self._after = None

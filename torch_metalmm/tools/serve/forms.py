"""The form of an answer: JSON of a schema, text of a regular expression or of a grammar.

llguidance says which tokens may come next: it has one wheel for every Python on Linux and macOS.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..marks import CALL, MARKS, THOUGHT, opened_by
from ..writing import end_tokens
from .calling import SPACING, Wanted
from .errors import unsupported, wrong


class Forms:
    """The forms of one model's answers; used from the threads of requests."""

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
        except ValueError as error:  # a tokenizer of another kind
            raise unsupported(wanted.field, str(error)) from None
        if wanted.kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(wanted.text, overrides=SPACING)
        elif wanted.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(wanted.text)
        else:
            grammar = LLMatcher.grammar_from_lark(wanted.text)
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            said = matcher.get_error().partition("\n")[0][:300]
            raise wrong(wanted.field, said)
        if wanted.kind == "calls":
            marks = [mark.opens for mark in MARKS if mark.kind == CALL]
            return Form(matcher, count, self._tokenizer, marks, tokens.tokenize_bytes)
        mark = opened_by(prompt)
        after = [mark.closes] if mark and mark.closes and mark.kind == THOUGHT else []
        return Form(matcher, count, self._tokenizer, after)


class Form:
    """A processor of logits, as transformers' own: of one answer, after each of its tokens."""

    def __init__(
        self,
        matcher: Any,
        count: int,
        tokenizer: Any,
        after: Iterable[str] = (),
        encode: Callable[[bytes], list[int]] | None = None,
    ) -> None:
        """count: tokens before the answer. after: what ends the text that is free, as the thought
        is that the prompt opens; none: nothing is. encode: given where what follows a text of the
        form is free until one of these comes once more; it makes tokens of what a token has beside
        the mark that it ends."""
        self._first, self._count, self._tokenizer = matcher, count, tokenizer
        self._matcher = matcher.deep_copy()
        self._after, self._encode = tuple(after), encode
        self._is_free = bool(self._after)
        self._free: list[int] = []  # the tokens of the text that is free

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """ids: [1, tokens so far], logits: [1, vocabulary], -inf where no answer of the form goes
        on. RuntimeError: the form is beyond llguidance's limits."""
        new = ids[0, self._count :].tolist()
        self._count += len(new)
        for token in new:
            self._take(token)
        if self._is_free:
            return logits
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(f"the form of the answer: {self._matcher.get_error()}")
        bits = np.unpackbits(allowed, count=logits.shape[-1], bitorder="little")
        return logits.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)

    def _take(self, token: int) -> None:
        if not self._is_free:
            self._matcher.consume_token(token)
            if self._encode is not None and self._matcher.is_accepting():
                self._matcher, self._is_free, self._free = self._first.deep_copy(), True, []
            return
        self._free.append(token)
        text = self._tokenizer.decode(self._free[-16:])
        for mark in self._after:
            if mark in text:
                self._is_free, rest = False, text.rpartition(mark)[2]
                if self._encode is not None and rest:
                    self._matcher.consume_tokens(self._encode(rest.encode()))
                return

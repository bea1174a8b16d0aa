"""Additions of a request to logits, and the shares of tokens that it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_LEAST = -9999.0  # OpenAI's number for a token that cannot come; JSON has no infinity


class Scored(NamedTuple):
    """A token of an answer: logarithms of its share, and of those that had the largest."""

    token: int
    share: float
    top: list[tuple[int, float]]


class Scores:
    """Shares of one answer's tokens among all, by the model's own logits: at temperature 1, of no
    form, without penalties."""

    def __init__(self, count: int, tell: Callable[[Scored], object]) -> None:
        """count: of the likeliest tokens, beside each that comes."""
        self._count, self._tell = count, tell

    def __call__(self, token: int, logits: Tensor) -> None:
        """logits: [1, vocabulary]."""
        shares = logits[0].float().log_softmax(-1).nan_to_num(nan=_LEAST, neginf=_LEAST)
        top = shares.topk(min(self._count, len(shares)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        self._tell(Scored(token, float(shares[token]), list(pairs)))


class Bias:
    """A processor of logits, as transformers' own: OpenAI's logit_bias and two penalties."""

    def __init__(
        self, count: int, biases: dict[int, float], frequency: float, presence: float
    ) -> None:
        """count: tokens of the prompt, which no penalty is for. frequency: for each time that a
        token came; presence: whether once or more."""
        self._count, self._tokens = count, torch.tensor([*biases], dtype=torch.long)
        self._biases = torch.tensor([*biases.values()])
        self._frequency, self._presence = frequency, presence

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """ids: [1, tokens so far], logits: [1, vocabulary] f32."""
        logits = logits.clone()
        logits[0, self._tokens.to(logits.device)] += self._biases.to(logits.device)
        came, times = torch.unique(ids[0, self._count :], return_counts=True)
        logits[0, came] -= self._frequency * times + self._presence
        return logits

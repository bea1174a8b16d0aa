"""Which token comes next, for each answer by its own options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..chat.session import Options


class Chooser:
    """Tokens of one answer: transformers' processors in its order, and a generator of its own."""

    def __init__(self, options: Options, seed: int | None, device: torch.device) -> None:
        from transformers import LogitsProcessorList
        from transformers.generation import logits_process as of

        self._is_greedy = not options.temperature
        self._processors: Any = LogitsProcessorList()
        self._processors.extend(options.own_processors())
        self._reads_tokens = options.repeat_penalty is not None or bool(self._processors)
        self._scores = options.scores
        if options.repeat_penalty is not None:
            self._processors.append(of.RepetitionPenaltyLogitsProcessor(options.repeat_penalty))
        if self._is_greedy:
            return
        self._generator = torch.Generator(device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._processors.append(of.TemperatureLogitsWarper(options.temperature))
        if options.top_k is not None:
            self._processors.append(of.TopKLogitsWarper(options.top_k))
        if options.top_p is not None and options.top_p < 1:
            self._processors.append(of.TopPLogitsWarper(options.top_p))
        if options.min_p is not None:
            self._processors.append(of.MinPLogitsWarper(options.min_p))

    def choose(self, logits: Tensor, tokens: list[int]) -> int:
        """logits: [1, vocabulary]. tokens: of prompt and answer."""
        token = self._chosen(logits, tokens)
        if self._scores is not None:
            self._scores(token, logits)
        return token

    def _chosen(self, logits: Tensor, tokens: list[int]) -> int:
        if self._processors:
            given = tokens if self._reads_tokens else []
            ids = torch.tensor([given], dtype=torch.long, device=logits.device)
            logits = self._processors(ids, logits.float())
        if self._is_greedy:
            return int(logits.argmax())
        shares = logits.softmax(-1)
        return int(torch.multinomial(shares, 1, generator=self._generator))

"""The tokens of a job's answer: chosen by its own options, told to who asked, up to the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..writing import Options, Writing
from .engine import Job


class Chooser:
    """Tokens of one answer: transformers' processors in its order, and a generator of its own."""

    def __init__(self, options: Options, seed: int | None, device: torch.device) -> None:
        from transformers import LogitsProcessorList
        from transformers.generation import logits_process as of

        self._is_greedy = not options.temperature
        self._processors: Any = LogitsProcessorList()
        if options.repeat_penalty is not None:
            self._processors.append(of.RepetitionPenaltyLogitsProcessor(options.repeat_penalty))
        self._processors.extend(options.own_processors())
        self._reads_tokens = bool(self._processors)
        self._scores = options.scores
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


class Choosing(Writing):
    """The answer to a job, a token at a time."""

    def __init__(self, job: Job, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, job.ids, job.options, job.tell)
        options = job.options
        if options.repeat_penalty is None:  # as generate() does
            options = replace(options, repeat_penalty=model.generation_config.repetition_penalty)
        self.job, self.chooser = job, Chooser(options, job.seed, model.device)

    def choose(self, logits: Tensor) -> str:
        """Choose the next token from logits [1, vocabulary]; how the answer ends, or ""."""
        self.add([self.chooser.choose(logits, self.tokens)])
        return self.reason()

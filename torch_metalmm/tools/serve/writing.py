"""The tokens of one answer: chosen, told to who asked, up to the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..chat.session import end_tokens
from ..chat.stream import Stream
from .choosing import Chooser
from .engine import Finish, Job


class Writing:
    """tokens: of the prompt, which grow by the answer."""

    def __init__(self, job: Job, model: Any, tokenizer: Any) -> None:
        self.job, self.tokens = job, list(job.ids)
        self.stream = Stream(tokenizer, job.options.stops, job.tell)
        self.stream.put(torch.tensor(job.ids))
        options = job.options
        if options.repeat_penalty is None:  # as generate() does
            options = replace(options, repeat_penalty=model.generation_config.repetition_penalty)
        self.chooser = Chooser(options, job.seed, model.device)
        self._ends = end_tokens(model)

    def left(self) -> int:
        """Tokens that may still come."""
        return int(self.job.options.max_new_tokens or 0) - len(self.stream.ids)

    def choose(self, logits: Tensor) -> str:
        """Choose the next token from logits [1, vocabulary]; how the answer ends, "" if it does
        not."""
        token = self.chooser.choose(logits, self.tokens)
        self.tokens.append(token)
        self.stream.put(torch.tensor([token]))
        if token in self._ends or self.stream.stops.found:
            return "stop"
        return "" if self.left() else "length"

    def finish(self, reason: str, kept: int = 0, right: int = 0, wrong: int = 0) -> None:
        """Tell the end; the counts as in Finish."""
        self.stream.finish()
        counts = len(self.job.ids), kept, len(self.stream.ids)
        self.job.tell(Finish(reason, *counts, right, wrong, self.stream.stops.found))

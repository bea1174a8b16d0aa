"""Answers to prompts with images, between the steps of all others."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...hf.stepwise import Steps, stepwise
from .engine import Job, Runner, Stopped, stoppable
from .writing import Writing

_LOG = logging.getLogger(__name__)


class Seeing:
    """A runner around another one, which has the jobs without images.

    One such answer at a time, each on a cache of its own: models place rows of an image by three
    numbers, or let them see each other, in ways of their own, so that transformers prepares these
    steps. A step is the whole prompt, or a token, after a step of the other runner.
    """

    def __init__(
        self, inner: Runner, model: Any, tokenizer: Any, new_cache: Callable[[], Any]
    ) -> None:
        self.inner, self._model, self._tokenizer = inner, model, tokenizer
        self._new_cache = new_cache
        self._jobs: deque[Job] = deque()
        self._writing: Writing | None = None  # of the first job
        self._steps: Steps | None = None

    def room(self) -> int:
        return max(0, self.inner.room() - len(self._jobs))

    def is_busy(self) -> bool:
        return bool(self._jobs) or self.inner.is_busy()

    def take(self, job: Job) -> None:
        if job.inputs:
            self._jobs.append(job)
        else:
            self.inner.take(job)

    def stop(self, job: Job) -> None:
        self.inner.stop(job)

    def fail(self, error: Exception) -> None:
        self.inner.fail(error)
        while self._jobs:
            self._over().tell(error)

    def step(self) -> None:
        try:
            if self.inner.is_busy():
                self.inner.step()
        except Exception as error:  # of the other answers
            _LOG.error("a step failed", exc_info=error)
            self.inner.fail(error)
        if not self._jobs:
            return
        try:
            if self._jobs[0].is_cancelled or self._advance(self._jobs[0]):
                self._over()
        except Stopped:
            self._over()
        except Exception as error:  # of this answer: the others have nothing in common with it
            _LOG.error("an answer failed", exc_info=error)
            self._over().tell(error)

    def _advance(self, job: Job) -> bool:
        """A token more; whether it was the last."""
        if self._writing is None or self._steps is None:
            self._writing = Writing(job, self._model, self._tokenizer)
            self._steps = stepwise(self._model, self._new_cache(), **self._inputs(job))
            with stoppable(self._model, lambda: job.is_cancelled):
                logits = next(self._steps)
        else:
            logits = self._steps.send(self._writing.tokens[-1])
        reason = self._writing.choose(logits)
        if reason:
            self._writing.finish(reason)
        return bool(reason)

    def _inputs(self, job: Job) -> dict[str, Any]:
        """On the model's device, numbers in its dtype."""
        device, dtype = self._model.device, self._model.dtype
        found = {}
        for name, value in job.inputs.items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None)
            found[name] = value
        return {"attention_mask": torch.ones_like(found["input_ids"])} | found

    def _over(self) -> Job:
        """The first job, whose answer is over; its rows are given back."""
        self._writing = self._steps = None
        return self._jobs.popleft()

"""Answers to prompts with images, between the steps of all others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...hf.stepwise import Steps, stepwise
from .choosing import Choosing
from .engine import Job, Runner, Stopped, stoppable
from .errors import ApiError, wrong

_LOG = logging.getLogger(__name__)


class Seeing(Runner):
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
        self._job: Job | None = None
        self._answer: tuple[Choosing, Steps] | None = None  # the job's answer, once it is begun

    def room(self) -> int:
        return max(0, self.inner.room() - (self._job is not None))

    def takes(self, job: Job) -> bool:
        return self.room() > 0 and not (job.inputs and self._job is not None)

    def is_busy(self) -> bool:
        return self._job is not None or self.inner.is_busy()

    def take(self, job: Job) -> None:
        if job.inputs:
            self._job = job
        else:
            self.inner.take(job)

    def fail(self, error: Exception) -> None:
        self.inner.fail(error)
        if self._job is not None:
            self._over(self._job).tell(error)

    def step(self) -> None:
        try:
            if self.inner.is_busy():
                self.inner.step()
        except Exception as error:  # an error of the other answers
            _LOG.error("a step failed", exc_info=error)
            self.inner.fail(error)
        if (job := self._job) is None:
            return
        try:
            if job.is_cancelled or self._advance(job):
                self._over(job)
        except Stopped:
            self._over(job)
        except ApiError as error:
            self._over(job).tell(error)
        except Exception as error:  # an error of this answer, with which the others share nothing
            _LOG.error("an answer failed", exc_info=error)
            self._over(job).tell(error)

    def _advance(self, job: Job) -> bool:
        """A token more; whether it was the last."""
        if self._answer is None:
            steps = stepwise(self._model, self._new_cache(), **self._inputs(job))
            writing = Choosing(job, self._model, self._tokenizer)
            self._answer = writing, steps
            logits = self._first(job, steps)
        else:
            writing, steps = self._answer
            logits = steps.send(writing.tokens[-1])
        reason = writing.choose(logits)
        if reason:
            job.tell(writing.finish(reason))
        return bool(reason)

    def _first(self, job: Job, steps: Steps) -> Tensor:
        """The logits behind the prompt. ApiError 400: the model takes no such prompt."""
        try:
            with stoppable(self._model, lambda: job.is_cancelled):
                return next(steps)
        except ValueError as error:  # a text has the token of a patch, beside those of an image
            raise wrong("messages", f"the model takes no such prompt: {error}") from None

    def _inputs(self, job: Job) -> dict[str, Any]:
        """On the model's device, numbers in its dtype."""
        device, dtype = self._model.device, self._model.dtype
        found = {}
        for name, value in job.inputs.items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None)
            found[name] = value
        return {"attention_mask": torch.ones_like(found["input_ids"])} | found

    def _over(self, job: Job) -> Job:
        """The job, whose answer is over; its entries are given back."""
        if self._answer is not None:
            self._answer[1].close()
        self._job = self._answer = None
        return job

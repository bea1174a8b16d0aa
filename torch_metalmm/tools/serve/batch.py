"""Several answers whose next tokens are computed in one step.

Packed weights are read once in a step for all answers. transformers' own continuous batching was
measured and not taken: its paged attention makes 22 tokens/s of one answer where generate() makes
50, and 60 of four where a step for all makes 164 (SmolLM2, Q4_1, two cores); and it has no seeds.
transformers' own server would run chat templates without bounds, and load what a request names.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from ..chat.session import end_tokens
from ..chat.stream import Stream
from ..sequence import CHUNK, Sequence
from .choosing import Chooser
from .engine import Finish, Job
from .rows import Held, apart, mask_of, together

_LOG = logging.getLogger(__name__)


class _Answer:
    """A job under way. The cache holds all its tokens but the last."""

    def __init__(self, job: Job, model: Any, tokenizer: Any) -> None:
        self.job = job
        self.tokens = list(job.ids)
        self.read = 0  # of the tokens: those that the cache holds
        self.stream = Stream(tokenizer, job.options.stops, job.tell)
        self.stream.put(torch.tensor(job.ids))
        options = job.options
        if options.repeat_penalty is None:  # as generate() does
            options = replace(options, repeat_penalty=model.generation_config.repetition_penalty)
        self.chooser = Chooser(options, job.seed, model.device)

    def finish(self, reason: str) -> None:
        self.stream.finish()
        self.job.tell(Finish(reason, len(self.job.ids), 0, len(self.stream.ids)))


class Batch:
    """A runner. Prompts are read one after the other, a part between two steps of the answers."""

    def __init__(self, model: Any, tokenizer: Any, most: int) -> None:
        """most: answers at a time."""
        self._model, self._tokenizer, self._most = model, tokenizer, most
        self._end_tokens = end_tokens(model)
        self._prompts: list[_Answer] = []  # of the first, _filling has what was read
        self._filling: Sequence | None = None
        self._answers: list[_Answer] = []  # the rows of _cache
        self._cache: Any = None

    def room(self) -> int:
        return self._most - len(self._prompts) - len(self._answers)

    def is_busy(self) -> bool:
        return bool(self._prompts or self._answers)

    def take(self, job: Job) -> None:
        self._prompts.append(_Answer(job, self._model, self._tokenizer))

    def stop(self, job: Job) -> None:
        """The next step sees that it is cancelled."""

    def fail(self, error: Exception) -> None:
        failed = self._prompts + self._answers
        self._prompts, self._answers = [], []
        self._filling = self._cache = None
        for answer in failed:
            answer.job.tell(error)

    def step(self) -> None:
        """A token for each answer, and a part of a prompt."""
        if self._prompts and self._prompts[0].job.is_cancelled:
            self._filling = None
        self._prompts = [a for a in self._prompts if not a.job.is_cancelled]
        if any(answer.job.is_cancelled for answer in self._answers):
            self._keep([a for a in self._answers if not a.job.is_cancelled])
        if self._answers:
            self._decode()
        if self._prompts:
            self._fill()

    # ---- prompts

    def _fill(self) -> None:
        """Read a part of the first prompt; where it is the last one, it becomes an answer."""
        answer = self._prompts[0]
        try:
            logits = self._read(answer)
        except Exception as error:  # of this prompt: nothing of the answers was touched
            _tell(answer, error)
            self._drop_first()
            return
        if answer.read < len(answer.tokens):
            return
        assert self._filling is not None
        if self._goes_on(answer, logits[:, -1]):
            if self._answers:
                held = apart(self._cache, [a.read for a in self._answers])
                held += apart(self._filling.cache, [answer.read])
                self._join([*self._answers, answer], held)
            else:
                self._answers, self._cache = [answer], self._filling.cache
        self._drop_first()  # not before: fail() tells those that are here

    def _read(self, answer: _Answer) -> torch.Tensor:
        """The logits of the next part of the prompt."""
        if self._filling is None:
            self._filling = Sequence(self._model)
        logits = self._filling.read(answer.tokens[answer.read : answer.read + CHUNK])
        answer.read = len(self._filling.tokens)
        return logits

    def _drop_first(self) -> None:
        del self._prompts[0]
        self._filling = None

    # ---- answers

    def _decode(self) -> None:
        answers, device = self._answers, self._model.device
        mask = mask_of([a.read + 1 for a in answers], device)
        logits = self._model(
            input_ids=torch.tensor([a.tokens[-1:] for a in answers], device=device),
            position_ids=torch.tensor([[a.read] for a in answers], device=device),
            past_key_values=self._cache,
            use_cache=True,
            **({} if mask is None else {"attention_mask": mask}),
        ).logits
        stay = []
        for row, answer in enumerate(answers):
            answer.read += 1
            if self._goes_on(answer, logits[row : row + 1, -1]):
                stay.append(answer)
        if len(stay) < len(answers):
            self._keep(stay)

    def _goes_on(self, answer: _Answer, logits: torch.Tensor) -> bool:
        """Choose its next token; False: it is over. An error is told to this answer alone."""
        try:
            token = answer.chooser.choose(logits, answer.tokens)
            answer.tokens.append(token)
            answer.stream.put(torch.tensor([token]))
            return not self._is_over(answer, token)
        except Exception as error:
            _tell(answer, error)
            return False

    def _is_over(self, answer: _Answer, token: int) -> bool:
        if token in self._end_tokens or answer.stream.stops.found:
            answer.finish("stop")
        elif len(answer.stream.ids) == answer.job.options.max_new_tokens:
            answer.finish("length")
        else:
            return False
        return True

    def _keep(self, stay: list[_Answer]) -> None:
        held = apart(self._cache, [a.read for a in self._answers])
        self._join(stay, [held[self._answers.index(answer)] for answer in stay])

    def _join(self, answers: list[_Answer], held: list[Held]) -> None:
        most = max((a.read for a in answers), default=0)
        self._cache = together(self._new_cache(), held, most) if answers else None
        self._answers = answers

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)


def _tell(answer: _Answer, error: Exception) -> None:
    _LOG.error("an answer failed", exc_info=error)
    answer.job.tell(error)

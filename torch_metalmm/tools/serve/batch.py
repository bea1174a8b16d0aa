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

from ...hf.caches.layers import DTYPE_NAMES
from ...models.attach import check_cache, set_cache
from ..chat.session import end_tokens
from ..chat.stream import Stream
from ..sequence import CHUNK, Sequence, keeps_rows, read_together
from .choosing import Chooser
from .engine import Finish, Job

_LOG = logging.getLogger(__name__)


def can_share(model: Any) -> bool:
    """Whether its answers can share steps: by rows of tokens, and our attention function.

    A chunk's first row, unlike that of a window, is not always behind the last one's.
    """
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if not keeps_rows(model) or "chunked_attention" in kinds or model.dtype not in DTYPE_NAMES:
        return False
    try:
        check_cache([model], DTYPE_NAMES[model.dtype])
    except ValueError:
        return False
    return True


class _Answer:
    """A job under way. The sequence has read all its tokens but the last."""

    def __init__(self, job: Job, model: Any, tokenizer: Any, cache: str) -> None:
        self.job = job
        self.tokens = list(job.ids)
        self.sequence = Sequence(model, cache)
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

    def __init__(self, model: Any, tokenizer: Any, most: int, cache: str | None = None) -> None:
        """most: answers at a time. cache: of each; None: in the model's dtype."""
        self._model, self._tokenizer, self._most = model, tokenizer, most
        self._format = cache or DTYPE_NAMES[model.dtype]
        set_cache([model], self._format)
        self._end_tokens = end_tokens(model)
        self._prompts: list[_Answer] = []
        self._answers: list[_Answer] = []

    def room(self) -> int:
        return self._most - len(self._prompts) - len(self._answers)

    def is_busy(self) -> bool:
        return bool(self._prompts or self._answers)

    def take(self, job: Job) -> None:
        self._prompts.append(_Answer(job, self._model, self._tokenizer, self._format))

    def stop(self, job: Job) -> None:
        """The next step sees that it is cancelled."""

    def fail(self, error: Exception) -> None:
        failed = self._prompts + self._answers
        self._prompts, self._answers = [], []
        for answer in failed:
            answer.job.tell(error)

    def step(self) -> None:
        """A token for each answer, and a part of a prompt."""
        self._prompts = [a for a in self._prompts if not a.job.is_cancelled]
        self._answers = [a for a in self._answers if not a.job.is_cancelled]
        if self._answers:
            logits = read_together(
                [a.sequence for a in self._answers], [a.tokens[-1] for a in self._answers]
            )
            given = zip(self._answers, torch.split(logits, 1), strict=True)
            self._answers = [a for a, own in given if self._goes_on(a, own[:, -1])]
        if self._prompts:
            self._fill()

    def _fill(self) -> None:
        """Read a part of the first prompt; where it is the last one, it becomes an answer."""
        answer = self._prompts[0]
        try:
            done = len(answer.sequence.tokens)
            logits = answer.sequence.read(answer.tokens[done : done + CHUNK])
        except Exception as error:  # of this prompt: nothing of the answers was touched
            _tell(answer, error)
            del self._prompts[0]
            return
        if len(answer.sequence.tokens) < len(answer.tokens):
            return
        if self._goes_on(answer, logits[:, -1]):
            self._answers.append(answer)
        del self._prompts[0]

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


def _tell(answer: _Answer, error: Exception) -> None:
    _LOG.error("an answer failed", exc_info=error)
    answer.job.tell(error)

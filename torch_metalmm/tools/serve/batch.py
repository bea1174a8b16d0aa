"""Several answers whose next tokens are computed in one step.

Packed weights are read once in a step for all answers. transformers' own continuous batching was
measured and not taken: its paged attention makes 22 tokens/s of one answer where generate() makes
50, and 60 of four where a step for all makes 164 (SmolLM2, Q4_1, two cores); and it has no seeds.
transformers' own server would run chat templates without bounds, and load what a request names.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ...hf.caches.hybrid import States
from ...hf.caches.layers import DTYPE_NAMES
from ...hf.caches.paged import PagedCache, PoolFull, Text, paged_cache
from ...hf.caches.pages import SLOTS
from ...hf.drafts import Drafter
from ...models.attach import check_cache, set_cache
from ...models.cache_argument import with_cache
from ...nn.again import noted
from ...nn.exact import exact_rows
from ..chat.session import drafters
from ..sequence import CHUNK, keeps_entries
from .choosing import Choosing
from .engine import Job, Runner
from .guessing import Guessing

_LOG = logging.getLogger(__name__)

# Tokens of the shortest part of a prompt, but of a prompt that is shorter: enough for kernels of
# many rows, whose results for a row do not depend on the others.
LEAST = 64
SECONDS = 0.25  # an answer's wait for a part of another's prompt
ROWS = 4  # rows of a step whose bits in packed layers do not depend on the number of rows


def can_share(model: Any) -> bool:
    """Whether its answers can share steps: by entries of tokens, our attention function, and our
    ops where a layer is recurrent.

    A chunk's first entry, unlike that of a window, is not always behind the last one's.
    """
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if (
        not keeps_entries(model, states=True)
        or "chunked_attention" in kinds
        or model.dtype not in DTYPE_NAMES
    ):
        return False
    try:
        check_cache([model], DTYPE_NAMES[model.dtype])
    except ValueError:
        return False
    return True


def guessing_of(draft: Any, model: Any, tokenizer: Any) -> Guessing | None:
    """By a draft of Session, for answers that share steps; None: there is none, or it drafts in a
    session alone."""
    if draft is None or not can_share(model):
        return None
    new = drafters(draft, model, tokenizer)
    return None if new is None else Guessing(new, ROWS // 2)


_NUMBERS = itertools.count()


class _Answer(Choosing):
    """A job under way: `held` has entries of a beginning of `tokens`."""

    def __init__(
        self, job: Job, cache: PagedCache, model: Any, tokenizer: Any, guessing: Guessing | None
    ) -> None:
        super().__init__(job, model, tokenizer)
        self.held, self.number = Text(cache, job.owner), next(_NUMBERS)
        self._guessing = guessing
        self.owner, self.may_draft = job.owner, guessing is not None
        self.drafter: Drafter | None = None
        self.guessed = self.right = 0  # tokens that were guessed, and those that were chosen
        self.kept: int | None = None  # tokens of the prompt whose entries another text has read

    def begin(self) -> None:
        """Hold the entries of its prompt's beginning that the cache has."""
        kept = self.held.begin(self.job.ids, LEAST)
        self.kept = kept if self.kept is None else self.kept
        if self._guessing is not None:
            self._guessing.lend(self)

    def release(self) -> None:
        """Give back what it holds."""
        self.held.end()
        if self._guessing is not None:
            self._guessing.give_back(self)

    def is_read(self) -> bool:
        return len(self.held.tokens) == len(self.tokens)

    def part(self, most: int) -> list[int]:
        """The next tokens of the prompt: `most`, or all where less than LEAST would be left."""
        left = self.job.ids[len(self.held.tokens) : self._stop()]
        return left if len(left) < most + LEAST else left[:most]

    def _stop(self) -> int:
        """Where the next part ends at the latest: states are kept there, for later prompts."""
        read, whole = len(self.held.tokens), len(self.job.ids)
        last = (whole - LEAST) // SLOTS * SLOTS
        if not self.held.cache.states.most_kept or read >= last:
            return whole
        return min(last, (read // CHUNK + 1) * CHUNK)

    def extend(self, part: list[int]) -> None:
        """The part of the prompt is read."""
        stop = self._stop()
        self.held.extend(part)
        if len(self.held.tokens) == stop < len(self.job.ids):
            self.held.keep_states()

    def unread(self, most: int) -> list[int]:
        """The first tokens without an entry, up to so many."""
        return self.tokens[len(self.held.tokens) :][:most]

    def choose(self, logits: Tensor) -> str:
        reason = super().choose(logits)
        if self.drafter is not None:
            self.drafter.add(self.tokens[-1])
        return reason

    def over(self, reason: str) -> None:
        self.release()
        guesses = self.right, self.guessed - self.right
        self.job.tell(self.finish(reason, self.kept or 0, *guesses))


class Batch(Runner):
    """A runner. A step is a token of each answer, then a part of a prompt, of each prompt in turn.

    With a drafter an answer's step has tokens more, which are guessed: a row for each shows what
    the model would have chosen, and those behind the first wrong one are forgotten.

    Rows do not depend on which other texts share a step, up to ROWS, nor, but for experts, on where
    a prompt's parts begin, so answers are those of a server with one client. Where the pages run
    out, the youngest answer gives its own back, and later reads its tokens again as it read them
    before.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        most: int,
        cache: str | None = None,
        memory: int | None = None,
        guessing: Guessing | None = None,
    ) -> None:
        """most: answers at a time. cache: the format of entries; None: the model's dtype. memory:
        bytes of all entries; None: a quarter of what the machine has free, and fewer answers at a
        time where their states take more than half of it.
        """
        self.model, self._tokenizer, self._guessing = model, tokenizer, guessing
        format = cache or DTYPE_NAMES[model.dtype]
        set_cache([model], format)
        self.cache = paged_cache(model, format, memory, texts=most)
        self._most = min(most, self.cache.states.count) if self.cache.states else most
        if self._most < most:
            _LOG.warning("%d answers at a time: the memory has no states for %d", self._most, most)
        self._keeps_logits = model._supports_logits_to_keep()
        self._prompts: deque[_Answer] = deque()
        self._answers: list[_Answer] = []
        self._speed = 0.0  # tokens of a prompt a second

    def room(self) -> int:
        return self._most - len(self._prompts) - len(self._answers)

    def is_busy(self) -> bool:
        return bool(self._prompts or self._answers)

    def take(self, job: Job) -> None:
        given = job, self.cache, self.model, self._tokenizer, self._guessing
        self._prompts.append(_Answer(*given))

    def fail(self, error: Exception) -> None:
        failed = [*self._prompts, *self._answers]
        self._prompts.clear()
        self._answers = []
        for answer in failed:
            answer.release()
            answer.job.tell(error)

    def step(self) -> None:
        for answer in [a for a in (*self._prompts, *self._answers) if a.job.is_cancelled]:
            self._drop(answer)
        if self._answers:
            self._advance()
        if self._prompts:
            self._fill()

    def _drop(self, answer: _Answer) -> None:
        answer.release()
        (self._prompts if answer in self._prompts else self._answers).remove(answer)

    def _advance(self) -> None:
        """A token of each answer, and what follows of the tokens that are known or guessed."""
        begin: float | None = time.monotonic()
        ahead = self._ahead()
        while self._answers:
            count = max(map(len, ahead))
            rows = [ids + ids[-1:] * (count - len(ids)) for ids in ahead]
            try:
                positions = self.cache.begin_step([a.held for a in self._answers], count)
                break
            except PoolFull:
                begin = None
                if count == 1:
                    self._give_back()
                ahead = [a.unread(1) for a in self._answers]
        else:  # the last one gave its pages back, to a prompt
            return
        before = States(self.cache.layers if count > 1 else ())
        with exact_rows(len(rows) * count <= ROWS):
            with noted(before.again):
                logits = self._forward(rows, positions, count)
            self._show(self._answers, ahead)
            self._keep(ahead, logits, before)
        if self._guessing is not None and begin is not None:
            self._guessing.took(len(rows), count, time.monotonic() - begin)

    def _ahead(self) -> list[list[int]]:
        """The tokens of each answer in a step: one, or as many as are worth their rows."""
        answers = self._answers
        most = max(1, min(ROWS // len(answers), *(a.left() for a in answers)))
        ahead = [a.unread(most) for a in answers]
        if self._guessing is not None and most > 1 and all(len(ids) == 1 for ids in ahead):
            guesses = self._guessing.guesses(answers, most - 1)
            ahead = [ids + more for ids, more in zip(ahead, guesses, strict=True)]
        if sum(map(len, ahead)) < 2 * len(answers):
            return [ids[:1] for ids in ahead]
        return ahead

    def _show(self, answers: list[_Answer], ids: list[list[int]]) -> None:
        """Let their drafters see what a step has computed of these tokens of each."""
        if self._guessing is not None:
            starts = [len(answer.held.tokens) for answer in answers]
            self._guessing.see(answers, starts, list(map(len, ids)))

    def _keep(self, ahead: list[list[int]], logits: Tensor, before: States) -> None:
        """Let each answer have the tokens of the step that are right; those that end are gone.

        logits: [answers, tokens of the step, vocabulary]. before: the states that it has moved.
        """
        for i, (answer, ids) in enumerate(zip([*self._answers], ahead, strict=True)):
            kept = self._take(answer, ids, logits[i])
            if not kept:
                self._answers.remove(answer)  # before another fails
                continue
            if kept < logits.shape[1] and not before.go_back(kept, slice(i, i + 1)):
                self._forward([ids[:kept]], self.cache.begin_step([answer.held], kept))
            answer.held.extend(ids[:kept], is_shared=False)

    def _take(self, answer: _Answer, ids: list[int], logits: Tensor) -> int:
        """How many tokens of a step are kept, up to the first wrong guess; 0: the answer is over.

        logits: [tokens of the step, vocabulary].
        """
        known = len(answer.tokens) - len(answer.held.tokens)
        guesses, right, kept = ids[known:], answer.right, min(known, len(ids))
        answer.guessed += len(guesses)
        if kept == known:  # the last token has an entry, and another is to be chosen
            for guess in [*guesses, None]:
                if not self._goes_on(answer, logits[kept - 1 : kept], guess):
                    return 0
                if answer.tokens[-1] != guess:
                    break
                kept += 1
        if guesses and self._guessing is not None:
            self._guessing.saw(answer, len(guesses), answer.right - right)
        return kept

    def _give_back(self) -> None:
        """The youngest text gives its pages back, and is read again. PoolFull: there is but one."""
        holders = [a for a in (*self._prompts, *self._answers) if a.held.pages]
        if len(holders) < 2:
            raise PoolFull("one text alone has more tokens than the cache has slots")
        youngest = max(holders, key=lambda answer: answer.number)
        self._drop(youngest)
        self._prompts.append(youngest)

    def _fill(self) -> None:
        """A part of the prompt whose turn it is; where it is the last, it becomes an answer."""
        answer = self._prompts[0]
        begin = time.monotonic()
        try:
            if not answer.held.pages:
                answer.begin()
            part = answer.part(self._part_size())
            logits = self._forward([part], self.cache.begin_step([answer.held], len(part)))
            self._show([answer], [part])
            answer.extend(part)
        except PoolFull:
            if not self._answers:  # no answer will end and give its pages back
                self._give_back()
            return
        except Exception as error:  # the error of this prompt: nothing of the answers was touched
            self._drop(answer)
            _tell(answer, error)
            return
        self._speed = len(part) / (time.monotonic() - begin)
        if len(answer.held.tokens) < len(answer.job.ids):
            self._prompts.rotate(-1)
            return
        # In one list at every moment: the client knows its first token, and may ask who is busy.
        if not answer.is_read() or self._goes_on(answer, logits[:, -1]):
            self._answers.append(answer)
        self._prompts.popleft()

    def _part_size(self) -> int:
        """Tokens of a part: while others wait for their next token, what is read in SECONDS."""
        if not self._answers and len(self._prompts) == 1:
            return CHUNK
        return min(CHUNK, max(LEAST, int(self._speed * SECONDS) // LEAST * LEAST))

    def _forward(self, ids: list[list[int]], positions: Tensor, last: int = 1) -> Tensor:
        """The logits of the last tokens, of models that can give these alone."""
        logits: Tensor = self.model(
            input_ids=torch.tensor(ids, device=self.model.device),
            position_ids=positions,
            use_cache=True,
            **with_cache(self.model, self.cache),
            **({"logits_to_keep": last} if self._keeps_logits else {}),
        ).logits
        return logits

    def _goes_on(self, answer: _Answer, logits: Tensor, guess: int | None = None) -> bool:
        """Choose its next token; False: it is over. An error is told to this answer alone."""
        try:
            reason = answer.choose(logits)
            answer.right += answer.tokens[-1] == guess
            if reason:
                answer.over(reason)
            return not reason
        except Exception as error:
            answer.release()
            _tell(answer, error)
            return False


def _tell(answer: _Answer, error: Exception) -> None:
    _LOG.error("an answer failed", exc_info=error)
    answer.job.tell(error)

"""Guesses of the next tokens in answers that share steps, drafted before the step that checks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from ...hf.drafts import Drafter, Pace, Reads, Sees
from ...hf.graphs import firsts
from ..sequence import CHUNK

_LOG = logging.getLogger(__name__)


class Drafted(Protocol):
    """A text under way. drafter: one that is lent; None: there is none."""

    tokens: list[int]
    owner: bytes
    drafter: Drafter | None
    may_draft: bool


class Guessing:
    """Drafters for so many texts at a time: a step of more has no rows for drafts.

    A drafter keeps what it has read of a text for another of the same owner that begins so. How
    much is drafted follows, for each number of texts in a step, from what steps took and what was
    right. An error of a draft ends that text's drafts, and no answer.
    """

    def __init__(
        self, new: Callable[[], Drafter], texts: int, pace: Callable[[], Pace] = Pace
    ) -> None:
        self._new = new
        self._idle: list[tuple[bytes, Drafter]] = [(b"", new()) for _ in range(texts)]
        self._paces = defaultdict[int, Pace](pace)
        self._kinds: dict[Drafter, tuple[Pace, Hashable]] = {}  # kind of the last draft
        self._sees = next((each for _, each in self._idle if isinstance(each, Sees)), None)
        self._is_timed, self._firsts = False, 0  # the step that is under way

    # ---- drafters

    def lend(self, text: Drafted) -> None:
        """A drafter, if one is left."""
        if text.drafter is not None or not text.may_draft or not self._idle:
            return
        own = [i for i, (whose, _) in enumerate(self._idle) if whose == text.owner]
        at = max(own, key=lambda i: _known(self._idle[i][1], text.tokens), default=0)
        whose, drafter = self._idle[at]
        try:
            if whose != text.owner:
                drafter = self._new()
            drafter.begin(text.tokens)
        except Exception as error:
            self._lose(text, error)
            return
        del self._idle[at]
        text.drafter = drafter

    def give_back(self, text: Drafted) -> None:
        if text.drafter is not None:
            self._kinds.pop(text.drafter, None)
            self._idle.append((text.owner, text.drafter))
            text.drafter = None

    def _lose(self, text: Drafted, error: Exception) -> None:
        _LOG.error("a draft failed", exc_info=error)
        text.may_draft = False
        self.give_back(text)

    # ---- steps

    def see(self, texts: Sequence[Drafted], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Show drafters what the model's last step has computed: of each text so many tokens, from
        a position on."""
        if self._sees is None or (hidden := self._sees.hidden.rows) is None:
            return
        for text, start, count, rows in zip(
            texts, starts, counts, torch.split(hidden, 1), strict=True
        ):
            if isinstance(text.drafter, Sees):
                try:
                    # A copy: a view would keep the rows of all texts.
                    text.drafter.see(start, rows[:, :count].clone())
                except Exception as error:
                    self._lose(text, error)

    def guesses(self, texts: Sequence[Drafted], most: int) -> list[list[int]]:
        """Tokens guessed behind each text, at most so many; behind none where one has no draft."""
        self._is_timed, self._firsts = True, firsts.count
        none: list[list[int]] = [[] for _ in texts]
        pace, count = self._paces[len(texts)], most
        for text in texts:
            self.lend(text)
            kind = None if text.drafter is None else text.drafter.kind()
            if text.drafter is None or kind is None:
                return none
            count = min(count, pace.count(kind, most))
            self._kinds[text.drafter] = pace, kind
        if not count:
            return none
        found = [self._proposed(text, count) for text in texts]
        return found if all(found) else none

    def _proposed(self, text: Drafted, count: int) -> list[int]:
        drafter = text.drafter
        assert drafter is not None
        try:
            if isinstance(drafter, Reads) and not drafter.catch_up(CHUNK):
                self._is_timed = False  # a part of the text was read
                return []
            return torch.as_tensor(drafter.propose(count)).tolist()
        except Exception as error:
            self._is_timed = False
            self._lose(text, error)
            return []

    def took(self, texts: int, rows: int, seconds: float) -> None:
        """A step of so many rows of each text, with its drafts, took that."""
        if self._is_timed:
            self._paces[texts].took(rows, seconds, firsts.count > self._firsts)
        self._is_timed = False

    def saw(self, text: Drafted, drafted: int, right: int) -> None:
        """So many of the drafted tokens were right."""
        if text.drafter is not None:
            pace, kind = self._kinds[text.drafter]
            pace.saw(kind, drafted, right)


def _known(drafter: Drafter, tokens: list[int]) -> int:
    return drafter.known(tokens) if isinstance(drafter, Reads) else 0

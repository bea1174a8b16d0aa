"""What may come next in answers that share steps, drafted before the step that checks it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from ...hf.drafts import Drafter, Pace, Sees, SmallModel
from ..sequence import CHUNK

_LOG = logging.getLogger(__name__)


class Guessing:
    """Drafters for so many texts at a time: a step of more has no rows for drafts.

    A drafter keeps what it has read of a text for the next one of the same owner. How much is
    drafted follows, for each number of texts in a step, from what steps took and what was right.
    """

    def __init__(
        self, new: Callable[[], Drafter], texts: int, pace: Callable[[], Pace] = Pace
    ) -> None:
        self._new = new
        self._idle: list[tuple[bytes, Drafter]] = [(b"", new()) for _ in range(texts)]
        self._paces = defaultdict[int, Pace](pace)
        self._kinds: dict[Drafter, tuple[Pace, Hashable]] = {}  # of what was drafted last
        self._sees = next((each for _, each in self._idle if isinstance(each, Sees)), None)
        self._is_timed = False  # the step that is under way

    def hidden(self) -> Tensor | None:
        """What the model's last step has computed, [texts, tokens, hidden_size], where drafters see
        it."""
        return None if self._sees is None else self._sees.hidden.rows

    def take(self, tokens: list[int], owner: bytes) -> Drafter | None:
        """A drafter of a text that begins with these; None: all are taken."""
        if not self._idle:
            return None
        own = [i for i, (whose, _) in enumerate(self._idle) if whose == owner]
        whose, drafter = self._idle.pop(own[-1] if own else 0)
        if whose != owner:
            drafter = self._new()
        drafter.begin(tokens)
        return drafter

    def give_back(self, drafter: Drafter, owner: bytes) -> None:
        self._kinds.pop(drafter, None)
        self._idle.append((owner, drafter))

    def guesses(self, drafters: Sequence[Drafter | None], most: int) -> list[list[int]]:
        """What follows each text, at most so many tokens: of none where one has no draft."""
        try:
            found = self._drafted(drafters, most)
        except Exception as error:  # of a draft alone: answers need none
            _LOG.error("a draft failed", exc_info=error)
            found = None
        self._is_timed = found is not None
        return found or [[] for _ in drafters]

    def _drafted(self, drafters: Sequence[Drafter | None], most: int) -> list[list[int]] | None:
        """As guesses(); None: a drafter is behind its text, which it reads in parts."""
        pace, count = self._paces[len(drafters)], most
        for drafter in drafters:
            kind = None if drafter is None else drafter.kind()
            if drafter is None or kind is None:
                return []
            count = min(count, pace.count(kind))
            self._kinds[drafter] = pace, kind
        if not count:
            return []
        known = [d for d in drafters if d is not None]
        behind = [d for d in known if isinstance(d, SmallModel) and not d.catch_up(CHUNK)]
        return None if behind else [d.propose(count) for d in known]

    def took(self, texts: int, rows: int, seconds: float) -> None:
        """A step of so many rows of each text, with its drafts, took that."""
        if self._is_timed:
            self._paces[texts].took(rows, seconds)
        self._is_timed = False

    def saw(self, drafter: Drafter, drafted: int, right: int) -> None:
        """So many of the drafted tokens were right."""
        pace, kind = self._kinds[drafter]
        pace.saw(kind, drafted, right)

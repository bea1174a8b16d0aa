"""Drafts: tokens that may follow, which a model then reads in one step.

A drafter proposes them, a Pace says how many are worth a step of so many rows. Whether they are
right only decides how fast an answer is (decoding.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..models.cache_argument import with_cache
from ..nn.exact import MOST
from ..nn.hidden import LastHidden
from .cache import PackedCache
from .caches.hybrid import States, crop_entries, states_of

# Rows of a step: the last token and 0, 1, 3 or 7 that are drafted. Each number of rows is a step
# that is recorded on its own, and no more have the bits of single ones.
ROWS = (1, 2, 4, MOST)
# Slots of a cache for which room is made before they come: 134 MB of a model of 8 B parameters in
# f16. Each growth has its steps recorded anew.
EXPECTED = 1024


@runtime_checkable
class Drafter(Protocol):
    """Proposes what follows one text."""

    def begin(self, tokens: list[int]) -> None:
        """Start a text that begins with these tokens."""

    def add(self, token: int) -> None:
        """The text's next token."""

    def kind(self) -> Hashable | None:
        """The kind of the proposals at this place of the text, for which the share of right ones is
        counted; None: nothing can be proposed."""

    def propose(self, most: int) -> list[int] | Tensor:
        """At least one token, up to `most`, where there is a kind. int64 [n] of a device: the host
        need not wait for what computes them."""


@runtime_checkable
class Reads(Drafter, Protocol):
    """A Drafter that reads its text, which takes time."""

    def known(self, tokens: list[int]) -> int:
        """The number of these tokens that it has read, from the first one on."""

    def catch_up(self, most: int) -> bool:
        """Read so many tokens where many are left; whether there were but few."""


@runtime_checkable
class Sees(Drafter, Protocol):
    """A Drafter that reads what the model computes."""

    hidden: LastHidden

    def see(self, start: int, hidden: Tensor) -> None:
        """The rows [1, n, hidden_size] of a step, of positions from start on; those of earlier
        steps from there on are of no text."""


def agreeing(a: Sequence[int], b: Sequence[int], known: int = 0) -> int:
    """How many tokens both texts begin with, of which so many are known."""
    most = min(len(a), len(b))
    while known < most and a[known] == b[known]:
        known += 1
    return known


class Lookup:
    """Prompt lookup: the text goes on as it did where its last tokens stood before.

    Of the last places where they stood that before which most tokens agree, the last of these.
    """

    _PLACES, _LONGEST = 16, 16  # that are compared; tokens of which it is counted that they agree

    def __init__(self, shortest: int = 2) -> None:
        """shortest: tokens that must agree."""
        self._shortest = shortest
        self.begin([])

    def begin(self, tokens: list[int]) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], list[int]] = {}  # a run of tokens: where it ended
        self._place = 0  # of what is proposed
        self.read(tokens)

    def read(self, tokens: list[int]) -> None:
        """Read the rest of this text, whose beginning is known."""
        for token in tokens[len(self._tokens) :]:
            self.add(token)

    def add(self, token: int) -> None:
        # A run is a place once it is known what stands behind it.
        if len(self._tokens) >= self._shortest:
            self._behind.setdefault(self._run(), []).append(len(self._tokens))
        self._tokens.append(token)

    def _run(self) -> tuple[int, ...]:
        return tuple(self._tokens[-self._shortest :])

    def kind(self) -> Hashable | None:
        """How many tokens agree, by powers of two."""
        most = 0
        for place in self._behind.get(self._run(), ())[-self._PLACES :]:
            count = self._agreeing(place)
            if count >= most:
                most, self._place = count, place
        return most.bit_length() or None  # 2 or 3, 4 to 7, 8 and more

    def _agreeing(self, place: int) -> int:
        tokens, count = self._tokens, self._shortest
        while count < min(self._LONGEST, place) and tokens[place - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def propose(self, most: int) -> list[int]:
        """Over and over those behind the place, if few are."""
        period = len(self._tokens) - self._place
        return [self._tokens[self._place + i % period] for i in range(most)]


class SmallModel:
    """The likeliest tokens of a model of the same vocabulary, on a cache of its own.

    Recurrent layers go back to their states before the last drafts, and read on from there.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._cache: Any = PackedCache(model.config)
        self._states, self._behind = States(), 0  # of recurrent layers, behind so many tokens
        self._tokens: list[int] = []
        self._held: list[int] = []  # those that the cache has entries of
        self._known = 0  # of the held ones that are the text's

    def begin(self, tokens: list[int]) -> None:
        self._tokens, self._known = [*tokens], 0

    def add(self, token: int) -> None:
        self._tokens.append(token)

    def kind(self) -> Hashable | None:
        return "model"

    def known(self, tokens: list[int]) -> int:
        return agreeing(self._held, tokens)

    def catch_up(self, most: int) -> bool:
        with torch.inference_mode():
            unread = self._unread()
            if len(unread) <= MOST:
                return True
            self._read(unread[:-1][:most])
        self._known = len(self._held)
        return False

    def propose(self, most: int) -> list[int]:
        found: list[int] = []
        with torch.inference_mode():
            unread = self._unread()
            self._known = len(self._tokens)  # once these are read
            while True:
                found.append(self._read(unread))
                if len(found) == most:
                    return found
                if len(found) == 1:
                    self._states.take(self._cache.layers)
                    self._behind = len(self._held)
                unread = found[-1:]

    def _unread(self) -> list[int]:
        """The tokens of the text behind those that are held, which are no others."""
        tokens, held = self._tokens, self._held
        same = agreeing(held, tokens[:-1], min(self._known, len(tokens) - 1))
        if len(held) > same:
            same = self._go_back(same)
        self._held = tokens[:same]
        return tokens[same:]

    def _go_back(self, most: int) -> int:
        """Forget what is held behind `most` tokens, or fewer: how many stay."""
        if not states_of(self._cache.layers):
            self._cache.crop(most - len(self._held))
            return most
        if not 0 < self._behind <= most:
            self._reset()
            return 0
        self._states.restore()
        crop_entries(self._cache.layers, len(self._held) - self._behind)
        return self._behind

    def _reset(self) -> None:
        self._held.clear()
        self._known = self._behind = 0
        self._cache.reset()

    def _read(self, unread: list[int]) -> int:
        """The likeliest token behind these, which are held."""
        self._held += unread
        ids = torch.tensor([unread], device=self.model.device)
        given = {"use_cache": True, **with_cache(self.model, self._cache)}
        try:
            return int(self.model(input_ids=ids, **given).logits[0, -1].argmax())
        except BaseException:  # within a layer, whose entries may be half there
            self._reset()
            raise


class Times:
    """Time of a step that is taken again and again: the median of the last ones, without steps that
    are recorded, replayed first, or captured, and without two more."""

    _UNTIMED, _TIMED = 2, 9

    def __init__(self) -> None:
        self._count = 0
        self._last: deque[float] = deque(maxlen=self._TIMED)

    def add(self, seconds: float, is_first: bool) -> None:
        self._count += not is_first
        if self._count > self._UNTIMED and not is_first:
            self._last.append(seconds)

    def known(self, least: int) -> float:
        """0: of fewer than so many times."""
        return median(self._last) if len(self._last) >= least else 0.0


class Pace:
    """How many tokens to draft, by what steps took and how many drafted tokens were right.

    A drafted token of a kind is right with probability p, so that k of them bring 1 + p + ... + p^k
    tokens a step; p of a kind that has not been tried is that of all, or a hope. Where no number of
    tokens is worth its step none is drafted; p then drifts to the hope, so that now and then a
    draft is tried. Behind many drafts some steps are without, so that what a step of one row takes
    is not that of long ago.
    """

    _HOPED = 0.4  # at the weight of two tries
    _DECAY, _DRIFT = 0.93, 0.005
    _ROW = 0.15  # of a step's time for a row more, until such a step has been timed
    _LEAST = 3  # steps of a number of rows that are timed before it is known what they take
    _MANY, _WITHOUT = 60, 6

    def __init__(self) -> None:
        self._steps: dict[int, Times] = {}  # by their rows
        self._right: dict[Hashable, tuple[float, float]] = {}  # right ones, tries
        self._tries = 0  # of all kinds
        self._drafts = self._without = 0  # since steps that were without; of these, those to come
        self.drafted = self.accepted = 0

    def count(self, kind: Hashable, most: int = MOST) -> int:
        """Tokens to draft of this kind, at most so many."""
        if not self._seconds(1):
            return 0
        if self._without:
            self._without -= 1
            return 0
        p = self._p(kind)
        rows = [m for m in ROWS if m <= most + 1]
        best = max(rows, key=lambda m: sum(p**i for i in range(m)) / self._of(m))
        if best == 1:
            right, tries = self._right[kind]
            self._right[kind] = right + self._DRIFT * (self._hoped() * tries - right), tries
            return 0
        self._drafts += 1
        if self._drafts == self._MANY:
            self._drafts, self._without = 0, self._WITHOUT
        return best - 1

    def _p(self, kind: Hashable) -> float:
        right, tries = self._right.setdefault(kind, (2 * self._hoped(), 2.0))
        return right / tries

    def _hoped(self) -> float:
        return max(self._HOPED, self.accepted / max(1, self._tries))

    def _seconds(self, rows: int) -> float:
        """Seconds of a step of so many rows, with its draft; 0: not known."""
        return self._steps[rows].known(self._LEAST) if rows in self._steps else 0.0

    def _of(self, rows: int) -> float:
        """Seconds as _seconds(), guessed before such a step has been timed."""
        near = next(m for m in range(rows, 0, -1) if self._seconds(m))
        return self._seconds(near) * (1 + self._ROW * (rows - near))

    def took(self, rows: int, seconds: float, is_first: bool = False) -> None:
        """A step of so many rows, with its draft, took that; a first one (graphs.firsts) longer
        than later ones will."""
        self._steps.setdefault(rows, Times()).add(seconds, is_first)

    def saw(self, kind: Hashable, drafted: int, accepted: int) -> None:
        """So many of the drafted tokens were right; the one behind them was not."""
        right, tries = self._right[kind]
        tried = min(drafted, accepted + 1)
        decay = self._DECAY**tried
        self._right[kind] = right * decay + accepted, tries * decay + tried
        self._tries += tried
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted

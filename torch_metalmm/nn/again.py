"""Recurrent ops of a step, to run again for its first rows alone.

A step of drafted tokens moves every state on by all of its rows. Where a draft was wrong the states
go back to those before the step, and the recurrent ops alone run again for the rows that stay: what
they read is what the step computed, so nothing else of the layers does. To keep the state behind
each row would write each state up to 8 times a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor

ALL = slice(None)


class Again:
    """The calls of recurrent ops in one step.

    whole: runs them for the first rows of all sequences, if somebody does that faster.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Tensor, ...], Tensor]] = []
        self.whole: Callable[[int], None] | None = None

    def moves(self, states: Sequence[Tensor]) -> bool:
        """Whether calls that are known have moved all of the states."""
        moved = {id(state) for *_, state in self.calls}
        return bool(self.calls) and all(id(state) in moved for state in states)

    def run(self, count: int, texts: slice = ALL) -> None:
        """For the first `count` rows of these sequences of the step."""
        if texts == ALL and self.whole is not None:
            self.whole(count)
            return
        for call, rows, state in self.calls:
            call(state[texts], *(t[texts, :count] for t in rows))

    def shown(self) -> list[Tensor]:
        """The tensors of the step that the calls read."""
        return [t for _, rows, _ in self.calls for t in rows]

    def of(self, shown: Sequence[Tensor]) -> Again:
        """The calls of a replayed step, which has these."""
        if all(map(is_, shown, self.shown())):
            return self
        found, given = Again(), iter(shown)
        for call, rows, state in self.calls:
            found.calls.append((call, tuple(next(given) for _ in rows), state))
        return found


class _Noted(threading.local):
    by: Again | None = None


_noted = _Noted()


@contextmanager
def noted(by: Again | None) -> Iterator[None]:
    """Inside, `by` gets the calls of recurrent ops of this thread."""
    before, _noted.by = _noted.by, by
    try:
        yield
    finally:
        _noted.by = before


def who_notes() -> Again | None:
    return None if torch.compiler.is_compiling() else _noted.by


def computed(call: Callable[..., Tensor], rows: tuple[Tensor, ...], state: Tensor) -> Tensor:
    """call(state, *rows), which moves the state [batch, ...]; rows are [batch, length, ...]."""
    by = who_notes()
    if by is not None:
        by.calls.append((call, rows, state))
    return call(state, *rows)

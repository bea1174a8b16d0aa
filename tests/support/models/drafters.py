"""Drafts that a test decides on."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from torch_metalmm.hf.drafts import ROWS, Pace, agreeing


class Told:
    """Proposes the tokens that come, but every so many of them another; or only others. Behind
    tokens that `silent` says, none."""

    def __init__(self, tokens: list[int], wrong: int, silent: str = "") -> None:
        self._told, self._wrong, self._silent, self._count = tokens, wrong, silent, 0

    def begin(self, tokens: list[int]) -> None:
        self._count = len(tokens)

    def add(self, token: int) -> None:
        self._count += 1

    def kind(self) -> Hashable | None:
        is_silent = self._silent[self._count % 16 : self._count % 16 + 1] == "-"
        return "told" if self._count < len(self._told) and not is_silent else None

    def propose(self, most: int) -> list[int]:
        rows = range(self._count, min(self._count + most, len(self._told)))
        return [(self._told[i] + 1) % 96 if i % self._wrong == 0 else self._told[i] for i in rows]


class Known(Told):
    """Proposes how that of the texts goes on that agrees most with its own."""

    def __init__(self, texts: list[list[int]], wrong: int) -> None:
        super().__init__([], wrong)
        self._texts = texts

    def begin(self, tokens: list[int]) -> None:
        super().begin(tokens)
        self._told = max(self._texts, key=partial(agreeing, tokens))


class Fixed(Pace):
    """So many tokens are drafted, whatever steps took."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.rows, self.firsts = most, list[int](), 0

    def count(self, kind: Hashable, most: int = 7) -> int:
        self._p(kind)
        return max(m - 1 for m in ROWS if m <= min(self.most, most) + 1)

    def took(self, rows: int, seconds: float, is_first: bool = False) -> None:
        self.rows.append(rows)
        self.firsts += is_first

"""Drafts by a model's own head for the token after the next one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..models.mtp import MtpHead
from ..nn.exact import MOST, exact_rows
from ..nn.hidden import LastHidden, last_hidden
from .answer import on_device
from .cache import PackedCache
from .caches.slots import Numbers
from .drafts import EXPECTED, ROWS, agreeing
from .replay import Replayed, replayed

_FEW = 8 * MOST  # positions, as there are behind some answers without drafts


class Mtp:
    """Drafts by an MtpHead, which sees what the model computes of a text (drafts.Sees)."""

    def __init__(self, model: Any, head: MtpHead, cache: Any = None) -> None:
        """cache: an empty one for the head's layer; None: a PackedCache in the model's dtype."""
        if replayed(head.block) is not None and replayed(head) is None:
            Replayed(head).attach()
        self.head = head
        self._cache = PackedCache(head.block.config) if cache is None else cache
        self.hidden = last_hidden(model) or LastHidden(model)
        self._tokens, self._numbers = list[int](), Numbers()
        # The head's cache has an entry of each position from the first one on that is read, and the
        # token behind it; the model's rows of those behind, as far as known, are here, and of a few
        # before them.
        self._first = self._read = self._known = self._before = 0
        self._rows: list[Tensor] = []

    def begin(self, tokens: list[int]) -> None:
        same = agreeing(tokens, self._tokens)
        self._tokens = [*tokens]
        if isinstance(self._cache, PackedCache):
            self._cache.expect(len(tokens) + EXPECTED)
        self._cut(same - 1)
        self._keep(same)

    def see(self, start: int, hidden: Tensor) -> None:
        self._cut(start)
        self._keep(start)
        if start > self._known:  # a text of which the head has not seen a part
            self._first += start - self._read
            self._read = start
            self._forget()
        self._rows.append(hidden)
        self._known = start + hidden.shape[1]

    def _cut(self, most: int) -> None:
        """Forget what the head has read from the position `most` on, and those beside the text."""
        if most < self._read:
            self._forget()  # they are of later positions
            self._known = self._read = max(0, most)
            self._first = min(self._first, self._read)
        beside = self._cache.get_seq_length() - (self._read - self._first)
        if beside:
            self._cache.crop(-beside)

    def _keep(self, known: int) -> None:
        """Forget the model's rows from that position on."""
        if self._known > known:
            self._known = max(known, self._read)
            count = self._before + self._known - self._read
            self._rows = [torch.cat(self._rows, 1)[:, :count]] if count else []

    def _forget(self) -> None:
        self._rows.clear()
        self._before = 0

    def add(self, token: int) -> None:
        self._tokens.append(token)

    def kind(self) -> Hashable | None:
        end = len(self._tokens) - 1  # the last position whose next token is not known
        return "mtp" if self._read < end <= self._known else None

    def known(self, tokens: list[int]) -> int:
        return agreeing(self._tokens, tokens)

    def catch_up(self, most: int) -> bool:
        left = len(self._tokens) - 1 - self._read
        if left <= MOST:
            return True
        with torch.inference_mode():
            self._cut(self._read)
            self._read_on(min(left - 1, most))
        return False

    def propose(self, most: int) -> Tensor:
        with torch.inference_mode():
            self._cut(self._read)
            return self._read_on(len(self._tokens) - 1 - self._read, most)[0]

    def _read_on(self, count: int, most: int = 1) -> Tensor:
        """The next so many positions of the text, by the model's rows: `most` likeliest tokens
        [1, most] behind them, which follow each other.

        In steps of as many as the model's are of, with some positions once more: each kind is
        recorded, and its kernels are compiled. A prompt is one.
        """
        while MOST < count <= _FEW:
            self._read_on(MOST)
            count -= MOST
        rows, again = torch.cat(self._rows, 1), 0
        if count <= MOST:
            again = next(m for m in ROWS if m >= count) - count
            again = again if again <= self._before else 0
        begin, own = self._read - again, rows[:, self._before - again :]
        given = on_device(self._tokens[begin + 1 : begin + 1 + again + count], rows.device)[None]
        at = self._numbers.part(begin + 1, begin + 1 + len(given[0]), given.device)[None]
        found = self._steps(given, at, own[:, : again + count], again, most)
        self._read += count
        end = self._before + count
        self._before = min(end, MOST)
        self._rows = [rows[:, end - self._before :]]
        return found

    def _steps(self, tokens: Tensor, at: Tensor, rows: Tensor, again: int, most: int) -> Tensor:
        """A step of tokens [1, n] at these positions, each with the row before it, the first
        `again` once more; then one of each likeliest token, until there are `most`."""
        given, steps, found = self.head.given, replayed(self.head), None
        first = {"input_ids": tokens, "position_ids": at, "cache": self._cache}
        try:
            if again:
                self._cache.crop(-again)
            with exact_rows(tokens.shape[1] <= MOST):  # by the fewest ops
                given.take(rows)
                if most > 1 and steps is not None and given.left is not None:
                    found = steps.chained(first, self._next(), most, given.likeliest)
                if found is None:
                    self.head(**first)
                    found = given.likeliest()
                    while found.shape[1] < most:
                        given.go_on()
                        self.head(**self._next())
                        found = torch.cat([found, given.likeliest()], 1)
        except BaseException:  # within the layer, whose entries may be half there
            self._cache.reset()
            self._first = self._read = self._known = len(self._tokens) - 1
            self._forget()
            raise
        return found

    def _next(self) -> dict[str, Any]:
        """The arguments of the step behind the last one."""
        token, position = self.head.given.left  # type: ignore[misc]
        return {"input_ids": token, "position_ids": position, "cache": self._cache}

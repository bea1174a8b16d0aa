"""Drafts by a model's own head for the token after the next one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..models.mtp import MtpHead
from ..nn.exact import MOST, exact_rows
from ..nn.hidden import LastHidden, last_hidden
from .cache import PackedCache
from .drafts import EXPECTED, ROWS, agreeing
from .replay import Replayed, replayed

_FEW = 8 * MOST  # positions, as there are behind some answers without drafts


class Mtp:
    """Drafts by an MtpHead, which sees what the model computes of a text (drafts.Sees)."""

    def __init__(self, model: Any, head: MtpHead, cache: Any = None) -> None:
        """cache: an empty one for the head's layer; None: a PackedCache in the model's dtype."""
        if replayed(head.block) is not None and replayed(head) is None:
            Replayed(head).attach()
        self.head, self._g = head, last_hidden(head) or LastHidden(head)
        self._cache = PackedCache(head.block.config) if cache is None else cache
        self.hidden = last_hidden(model) or LastHidden(model)
        self._tokens: list[int] = []
        # The head's cache has a row of each position from the first one on that is read, and the
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

    def propose(self, most: int) -> list[int]:
        with torch.inference_mode():
            self._cut(self._read)
            end = len(self._tokens) - 1
            token, g = self._read_on(end - self._read)
            found = [token]
            for i in range(1, most):
                token, g = self._step(token, g, end + i)
                found.append(token)
            likeliest: list[int] = torch.cat(found, 1)[0].tolist()
        return likeliest

    def _read_on(self, count: int) -> tuple[Tensor, Tensor]:
        """The next so many positions of the text, by the model's rows; as _step.

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
        given = torch.tensor([self._tokens[begin + 1 :][: again + count]], device=rows.device)
        found = self._step(given, own[:, : again + count], begin + 1, again)
        self._read += count
        end = self._before + count
        self._before = min(end, MOST)
        self._rows = [rows[:, end - self._before :]]
        return found

    def _step(
        self, given: Tensor, hidden: Tensor, begin: int, again: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(the likeliest token [1, 1], what stands in for the model's row) behind tokens [1, n]
        from a position on, each with the row before it; the first `again` are read once more."""
        at = torch.arange(begin, begin + given.shape[1], device=given.device)[None]
        self.head.given.take(hidden)
        try:
            if again:
                self._cache.crop(-again)
            with exact_rows(given.shape[1] <= MOST):  # by the fewest ops
                logits = self.head(input_ids=given, position_ids=at, cache=self._cache).logits
        except BaseException:  # within the layer, whose rows may be half there
            self._cache.reset()
            self._first = self._read = self._known = len(self._tokens) - 1
            self._forget()
            raise
        assert self._g.rows is not None  # of the head's step
        return logits[:, -1].argmax(-1, keepdim=True), self._g.rows[:, -1:]

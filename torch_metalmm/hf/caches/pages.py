"""The tokens in each page of a pool: references, prefixes that texts share, what goes first.

A page is 64 slots of every layer. Each text has references to its pages; a full page is known by
its tokens and by the page before it, so that a later text finds the longest beginning that is held.
The first page of a text is known by whose it is: texts of two owners have no page in common.
A page without references stays as long as no text needs its place; the one that was used longest
ago goes first. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

SLOTS = 64  # kPageSlots of metal/abi.h
_Key = tuple[int | bytes, tuple[int, ...]]  # the serial of the page before, or whose; its tokens


class PoolFull(Exception):
    """All pages are held by texts under way."""


@dataclass
class Pages:
    """`count` pages, of which none holds anything at first."""

    count: int
    _free: list[int] = field(default_factory=list)
    _references: list[int] = field(default_factory=list)
    _known: dict[_Key, int] = field(default_factory=dict)
    _keys: dict[int, _Key] = field(default_factory=dict)  # the other way round
    _serials: list[int] = field(default_factory=list)  # serial of a page's contents, never reused
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # known, no text's
    _made: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.count - 1, -1, -1))
        self._references, self._serials = [0] * self.count, [0] * self.count

    @property
    def available(self) -> int:
        """Pages that a text may be given."""
        return len(self._free) + len(self._idle)

    def serial(self, page: int) -> int:
        """The number of what the page holds."""
        return self._serials[page]

    def take(self) -> int:
        """A page for new entries. PoolFull: there is none."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            raise PoolFull(f"all {self.count} pages are held by texts under way")
        self._references[page] = 1
        self._made += 1
        self._serials[page] = self._made
        return page

    def release(self, pages: Sequence[int]) -> None:
        """A text is over, or cropped. Its last page goes before the pages that it follows."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, pages: Sequence[int], tokens: Sequence[int], owner: bytes = b"") -> None:
        """The pages hold these tokens from the first on; the owner may find full ones from here on.

        Where two texts have read the same, the first is found.
        """
        follows: int | bytes = owner
        for i in range(len(tokens) // SLOTS):
            page = pages[i]
            key = follows, tuple(tokens[i * SLOTS : (i + 1) * SLOTS])
            known = self._known.setdefault(key, page)
            if known == page:
                self._keys[page] = key
            follows = self._serials[known]

    def find(self, tokens: Sequence[int], most: int, owner: bytes = b"") -> list[int]:
        """The owner's pages of the longest beginning of the text, of at most `most` tokens.

        Each has a reference more: release() is to be called.
        """
        found: list[int] = []
        follows: int | bytes = owner
        for i in range(most // SLOTS):
            page = self._known.get((follows, tuple(tokens[i * SLOTS : (i + 1) * SLOTS])))
            if page is None:
                break
            if not self._references[page]:
                del self._idle[page]
            self._references[page] += 1
            found.append(page)
            follows = self._serials[page]
        return found

    def kept(self) -> list[tuple[int, int | bytes, tuple[int, ...]]]:
        """Known pages that no text holds, the last used first but behind those that they follow.

        (page, place in the list of the page before or the owner, tokens) of each.
        """
        of_serial = {self._serials[page]: page for page in self._idle}
        places: dict[int, int] = {}
        found: list[tuple[int, int | bytes, tuple[int, ...]]] = []
        for last in reversed(self._idle):
            chain: list[int] = []
            at: int | None = last
            while at is not None and at not in places:
                chain.append(at)
                follows = self._keys[at][0]
                if isinstance(follows, bytes):
                    break
                at = of_serial.get(follows)  # None: that page is gone, and nobody finds this one
            if at is None:
                continue
            for page in reversed(chain):
                follows, tokens = self._keys[page]
                before = follows if isinstance(follows, bytes) else places[of_serial[follows]]
                places[page] = len(found)
                found.append((page, before, tokens))
        return found

    def restore(
        self, follows: Sequence[int | bytes], blocks: Sequence[tuple[int, ...]]
    ) -> list[int]:
        """The pages for what kept() gave, of as many as are free.

        ValueError: one follows none of those before it, or is twice there.
        """
        pages: list[int] = []
        count = min(len(self._free), len(blocks))
        for i, (before, tokens) in enumerate(zip(follows[:count], blocks[:count], strict=True)):
            if isinstance(before, int) and not 0 <= before < i:
                raise ValueError(f"before: {before} of page {i}; must be a page before it")
            page = self.take()
            key = before if isinstance(before, bytes) else self._serials[pages[before]], tokens
            if self._known.setdefault(key, page) != page:
                raise ValueError(f"tokens: page {i} is there twice")
            self._keys[page] = key
            pages.append(page)
        self.release(pages)
        return pages

    def _forget(self, page: int) -> None:
        del self._known[self._keys.pop(page)]

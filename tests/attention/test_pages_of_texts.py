"""Who holds which page of a cache in pages: against a list of what each page was given for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_metalmm.hf.caches.pages import SLOTS, Pages, PoolFull


class Texts:
    """Texts of a pool, and beside them what was written to each page."""

    def __init__(self, count: int) -> None:
        self.pages = Pages(count)
        self.written, self.owners = dict[int, list[int]](), dict[int, bytes]()
        self.texts = list[tuple[list[int], list[int]]]()

    def begin(self, ids: list[int], owner: bytes) -> None:
        found = self.pages.find(ids, len(ids), owner)
        for i, page in enumerate(found):
            assert self.written[page] == ids[i * SLOTS : (i + 1) * SLOTS]
            assert self.owners[page] == owner
        try:
            while len(found) * SLOTS < len(ids):
                page = self.pages.take()
                assert not any(page in held for held, _ in self.texts) and page not in found
                self.written[page] = ids[len(found) * SLOTS : (len(found) + 1) * SLOTS]
                self.owners[page] = owner
                found.append(page)
        except PoolFull:
            assert not self.pages.available
            self.pages.release(found)
            return
        self.pages.publish(found, ids, owner)
        self.texts.append((found, ids))

    def check(self) -> None:
        """Nobody has written where a text still reads, and no page is lost."""
        for held, ids in self.texts:
            for i, page in enumerate(held):
                assert self.written[page] == ids[i * SLOTS : (i + 1) * SLOTS]
        held_pages = {page for held, _ in self.texts for page in held}
        assert self.pages.available == self.pages.count - len(held_pages)


# Blocks of a text: few, so that beginnings are alike; the last one of some tokens.
BLOCKS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
OWNERS = st.sampled_from([b"", b"a"])


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), BLOCKS, st.sampled_from([0, 1, 40]), OWNERS), max_size=30))
def test_pages_are_their_texts(steps: list[tuple[bool, list[int], int, bytes]]) -> None:
    texts = Texts(7)
    for ends, blocks, rest, owner in steps:
        if ends and texts.texts:
            texts.pages.release(texts.texts.pop(len(blocks) % len(texts.texts))[0])
        else:
            texts.begin([b for block in blocks for b in [block] * SLOTS] + [2] * rest, owner)
        texts.check()


def test_the_longest_beginning_is_found_and_the_oldest_goes() -> None:
    pages = Pages(4)
    first, second = [1] * SLOTS, [2] * SLOTS
    for ids in (first + second, second):
        held = [pages.take() for _ in range(len(ids) // SLOTS)]
        pages.publish(held, ids)
        pages.release(held)
    assert pages.find(second + first, 2 * SLOTS) == [2]
    pages.release([2])
    # One is free; then the last of the first text goes, its first, and the second.
    assert [pages.take() for _ in range(4)] == [3, 1, 0, 2]
    with pytest.raises(PoolFull, match="all 4 pages"):
        pages.take()
    assert not pages.available

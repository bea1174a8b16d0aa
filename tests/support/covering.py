"""Which cases run of a test whose parameters make a product: strategies, formats, dtypes, others.

A kernel is a strategy's loop around a format's decode, in a dtype: a fault lies in one of them, or
in what one expects of another. Therefore every value of every parameter occurs on each engine, and
every pair of values of two parameters. In pairs a format stands for its family: the formats of a
module of the specification share the shape of their decode. Each test takes others of a family.
The emulator's second schedule takes every value but not every pair: it looks for races.

METALMM_TEST_CASES=all runs the products, as the scheduled workflow does.
"""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations

import pytest
from backends import CASES, DESCENDING
from oracle import FORMATS

from torch_metalmm import formats

_FAMILY = {name: type(formats.get(name)).__module__ for name in FORMATS}


def _columns(item: pytest.Function) -> dict[str, str]:
    """{parameter: its value}; those of one `parametrize` are one column, a row of its table."""
    groups = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        groups.update(dict.fromkeys(names, " ".join(names)))
    columns: defaultdict[str, str] = defaultdict(str)
    for name, value in item.callspec.params.items():
        if name != "backend":
            columns[groups.get(name, name)] += value if isinstance(value, str) else repr(value)
    return dict(columns)


def _shown(item: pytest.Function) -> frozenset[Hashable]:
    """The values and the pairs of values of a case, and that its test runs."""
    columns = _columns(item)
    shown: set[Hashable] = {"runs", *columns.items()}
    if item.callspec.params.get("backend") is DESCENDING:
        return frozenset(shown)
    if "name" in columns:
        columns["name"] = _FAMILY.get(columns["name"], columns["name"])
    return frozenset(shown.union(combinations(sorted(columns.items()), 2)))


def _fewest(cases: Iterable[tuple[str, frozenset[Hashable]]]) -> set[str]:
    """Ids of few cases that show all that these do: next is the one that shows the most new."""
    left = [(-len(shows), zlib.crc32(i.encode()), i, shows) for i, shows in cases]
    heapq.heapify(left)
    taken, seen = set(), set[Hashable]()
    while left:
        _, order, i, shows = heapq.heappop(left)
        if new := shows - seen:
            if left and (-len(new), order) > left[0][:2]:  # another may show more by now
                heapq.heappush(left, (-len(new), order, i, new))
                continue
            taken.add(i)
            seen |= new
    return taken


def covered(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items that run: all of a test without `backend` that is not marked `covering`."""
    if CASES == "all":
        return items
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            backend = item.callspec.params.get("backend")
            if backend or item.get_closest_marker("covering"):
                of = (item.nodeid.split("[")[0], getattr(backend, "name", ""))
                cases[of].append((item.nodeid, _shown(item)))
    left_out = {i for of in cases.values() for i, _ in of}
    left_out -= set().union(*map(_fewest, cases.values()))
    return [item for item in items if item.nodeid not in left_out]

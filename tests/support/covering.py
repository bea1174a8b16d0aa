"""Which cases run of a test whose parameters make a product: strategies, formats, dtypes, others.

A kernel is a strategy's loop around a format's decode, in a dtype: a fault lies in one of them, or
in what one expects of another. Therefore every value of every parameter occurs on each engine, and
every pair of values of two parameters. In pairs a format stands for its family: the formats of a
module of the specification share the shape of their decode. Each test takes others of a family.
The emulator's second schedule takes every value but not every pair: it looks for races.

A kernel of the emulator takes a second to compile. There a format is a value of its own in tests
marked `every_format` alone; and all tests take the same format of a family and the dtype that
compiled_dtype() has for it, so that one compilation serves them.

METALMM_TEST_CASES=all runs the products, as the scheduled workflow does.
"""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations

import pytest
from backends import CASES, DESCENDING, EMULATOR, FAMILY, compiled_dtype


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


def _is_compiled(item: pytest.Function) -> bool:
    """Whether the kernels of a case are compiled for it."""
    of_emulator = item.callspec.params.get("backend") in (EMULATOR, DESCENDING)
    return of_emulator or item.get_closest_marker("shaders") is not None


def _shown(item: pytest.Function) -> frozenset[Hashable]:
    """The values and the pairs of values of a case, and that its test runs."""
    columns = _columns(item)
    name = columns.get("name", "")
    family = columns | ({"name": FAMILY.get(name, name)} if name else {})
    shown: set[Hashable] = {"runs", *family.items()}
    every = item.get_closest_marker("every_format")
    if every or not _is_compiled(item):
        shown |= columns.items()
    if item.callspec.params.get("backend") is DESCENDING:
        return frozenset(shown)
    return frozenset(shown.union(combinations(sorted(family.items()), 2)))


def _is_taken(item: pytest.Function) -> bool:
    """Whether other tests compile the kernel of a case for its dtype of x."""
    params = item.callspec.params
    if not _is_compiled(item) or not {"name", "dtype"} <= params.keys():
        return True
    return params["dtype"] == compiled_dtype(params["name"], params.get("strategy"))


def _order(item: pytest.Function) -> tuple[int, int]:
    """Which of cases that show as much is taken."""
    params = item.callspec.params
    kernel = params.get("strategy", params.get("kernel")) or "gemv"  # which few rows take
    compiled = f"{kernel} {params.get('name')}"
    return zlib.crc32(compiled.encode()) * _is_compiled(item), zlib.crc32(item.nodeid.encode())


def _fewest(cases: Iterable[pytest.Function]) -> set[str]:
    """Ids of few cases that show all that these do: next is the one that shows the most new."""
    shown = ((_order(item), item.nodeid, _shown(item)) for item in cases)
    left = [(-len(shows), order, i, shows) for order, i, shows in shown]
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
    """The items that run: all of a test that takes no `backend` and is not marked."""
    if CASES == "all":
        return items
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            backend = item.callspec.params.get("backend")
            if backend or any(map(item.get_closest_marker, ("covering", "shaders"))):
                of = (item.nodeid.split("[")[0], getattr(backend, "name", ""))
                cases[of].append(item)
    left_out = {item.nodeid for of in cases.values() for item in of}
    for of in cases.values():
        left_out -= _fewest([item for item in of if _is_taken(item)] or of)
    return [item for item in items if item.nodeid not in left_out]

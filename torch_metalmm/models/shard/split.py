"""The division of a group of layers' rows and columns among ranks: numbers, no model."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from ...nn.sharded import Ranges


def even(size: int, ranks: int, unit: int = 1) -> Ranges | None:
    """0 .. size - 1 in `ranks` parts of whole units, as even as they can be; the last unit may be
    shorter. None: there are fewer units than ranks.
    """
    units = -(-size // unit)
    if units < ranks:
        return None
    each, more = divmod(units, ranks)
    ends = [min(size, unit * (each * (r + 1) + min(r + 1, more))) for r in range(ranks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


@dataclass(frozen=True)
class Heads:
    """The heads of queries that each rank has, and the heads of keys and values that these read."""

    queries: Ranges
    keys: Ranges

    def groups(self, rank: int) -> int:
        """Heads of queries that share one of keys and values on this rank."""
        (a, b), (c, d) = self.queries[rank], self.keys[rank]
        return (b - a) // (d - c)


def heads(queries: int, keys: int, ranks: int, size: int, block: int) -> Heads | None:
    """The heads of attention for each rank; None: they cannot be divided.

    queries, keys: how many there are; size: values of a head, block: of the layer that reads them.
    A rank has whole heads of keys, with all their queries, where there are as many heads of keys as
    ranks; else ranks share a head of keys, each with some of its queries. Where a rank's columns
    end, a block ends.
    """
    if queries % keys:
        return None
    group = queries // keys
    aligned = lcm(size, block) // size  # heads of queries that end where a block ends
    if keys >= ranks:
        unit = lcm(aligned, group) // group
        found = even(keys, ranks, unit)
        if found is None:
            return None
        return Heads(tuple((a * group, b * group) for a, b in found), found)
    if group % aligned:
        return None
    shares = even(ranks, keys)  # the ranks that share each head of keys
    assert shares is not None
    of_queries: list[tuple[int, int]] = []
    of_keys: list[tuple[int, int]] = []
    for key, (first, last) in enumerate(shares):
        parts = even(group, last - first, aligned)
        if parts is None:
            return None
        of_queries += [(key * group + a, key * group + b) for a, b in parts]
        of_keys += [(key, key + 1)] * len(parts)
    return Heads(tuple(of_queries), tuple(of_keys))


def scaled(ranges: Ranges, factor: int) -> Ranges:
    return tuple((a * factor, b * factor) for a, b in ranges)

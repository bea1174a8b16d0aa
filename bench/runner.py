"""The runner of cells: every way of a cell is checked, then all are timed in turns with the roofs.

A subject (matmul.py, attention.py) says what its cells are. Records and tables are the same for
all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch_metalmm import formats

from .devices import CPU, Device
from .problem import COLD_FACTOR, DTYPES, Setting, parse_names
from .roofs import Roof, of_cpu, of_gpu
from .tables import Record, status
from .timing import Timed, Timing, interleave, wall_clock

SLOW, FEW = 8.0, 3  # a way that takes so many times the fastest has few calls on a CPU


@dataclass(frozen=True)
class Way:
    """One way to compute what a cell asks for; call(i) takes copy i of the operands.

    check() is the part of the record that says whether the result is right: "ok", and by how much.
    A way without a check is there for its time.
    """

    name: str
    call: Callable[[int], object]
    copies: int = 1
    check: Callable[[], Record] | None = None
    read: float = 0.0  # bytes
    flops: float = 0.0
    is_peer: bool = False
    against: Mapping[str, str] = field(default_factory=dict)  # {field: way whose time is over this}
    facts: Record = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """Ways that are timed in turns. may_be_slow: those far behind get few calls."""

    kind: str
    title: str
    about: Record
    ways: Sequence[Way]
    device: Device = CPU
    may_be_slow: bool = False


def run_cell(
    cell: Cell, roofs: Roof | None, repetitions: int, seconds: float = 0.0
) -> list[Record]:
    """A record for each way; a wrong one is not timed."""
    records: dict[int, Record] = {}
    right: dict[str, Way] = {}
    for i, way in enumerate(cell.ways):
        head = {"kind": cell.kind, "title": cell.title, **cell.about, "variant": way.name}
        records[i] = head | way.facts | (way.check() if way.check else {})
        if records[i].get("ok", True):
            right[way.name] = way
    times = slow_ones(right) if cell.may_be_slow and cell.device == CPU else {}
    timed = {n: cell.device.timed(w.call, w.copies) for n, w in right.items() if n not in times}
    probes: dict[str, Timed] = roofs.timed() if roofs else {}
    times |= interleave(timed | probes, repetitions, seconds)
    peers = [times[n] for n, w in right.items() if w.is_peer]
    best = min(peers, key=lambda t: t.median, default=None)
    reached = roofs.reached(times) if roofs else None
    for i, way in enumerate(cell.ways):
        if way.name in right:
            records[i] |= measured(way, times, best, reached)
    return list(records.values())


def measured(
    way: Way,
    times: Mapping[str, Timing],
    best: Timing | None,
    roofs: tuple[float, float] | None,
) -> Record:
    """Time, rates, shares of the roofs (GB/s, GFLOP/s), and ratios to other ways."""
    t = times[way.name]
    out: Record = t.fields("us", lambda s: round(s * 1e6, 3)) | {"count": t.count}
    for name, work, roof_of in zip(
        ("gbs", "gflops"), (way.read, way.flops), roofs or (None, None), strict=True
    ):
        if work:
            out[name] = work / t.median / 1e9
            if roof_of is not None:
                share = {"gbs": "percent_read", "gflops": "percent_peak"}[name]
                out |= {f"roof_{name}": roof_of, share: 100 * out[name] / roof_of}
    others = {field: times[name] for field, name in way.against.items() if name in times}
    for field_, other in (others | ({"of_best": best} if best else {})).items():
        out[field_] = other.median / t.median
        out |= {f"{field_}_q1": other.q1 / t.q3, f"{field_}_q3": other.q3 / t.q1}
    return out


def slow_ones(found: Mapping[str, Way]) -> dict[str, Timing]:
    """The ways that take SLOW times as long as the fastest in each of FEW calls, timed by these."""

    def once(way: Way) -> float:
        return wall_clock(lambda: way.call(0))

    first = {name: once(way) for name, way in found.items()}
    limit, slow = SLOW * min(first.values(), default=0.0), {}
    for name, t in first.items():
        samples = [t]
        while samples[-1] > limit and len(samples) < FEW:
            samples.append(once(found[name]))
        if min(samples) > limit:
            slow[name] = Timing.of(samples)
    return slow


class Run:
    """A run of the command line: its arguments, the device, the roofs once they are asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, Device.named(args.device)

    @cached_property
    def setting(self) -> Setting:
        """The setting that the options say; with --quick, copies of W that fit a cache."""
        args, dtype = self.args, getattr(self.args, "dtype", None)
        cold = (4 << 20) if args.quick else self.device.cache_bytes * COLD_FACTOR
        to = DTYPES[dtype] if dtype else self.device.dtype
        return Setting(args.threads, cold, to, self.device, getattr(args, "strategy", None))

    @cached_property
    def roof(self) -> Roof:
        status("roofs")
        if self.device == CPU:
            return of_cpu(self.args.threads, self.device.cache_bytes, quick=self.args.quick)
        return of_gpu(self.device, quick=self.args.quick)

    def roof_record(self) -> Record:
        found = self.roof
        record: Record = {"kind": "roof", "native": found.native, "candidates": found.candidates}
        for kind, probes in (("read", found.read), ("fma", found.fma)):
            record[kind] = {p.name: found.candidates[p.name] for p in probes}
        return record

    def cells(self, cells: Iterable[Cell], has_roof: bool = True) -> Iterator[Record]:
        """The records of cells, each made when it is its turn; the roofs before and after."""
        if has_roof:
            yield self.roof_record()
        beside: dict[str, list[float]] = {"gbs": [], "gflops": []}
        seconds = getattr(self.args, "seconds", None) or 0.0
        roofs = self.roof if has_roof else None
        for cell in cells:
            status(f"{cell.title}, {', '.join(f'{k} {v}' for k, v in cell.about.items())}")
            for record in run_cell(cell, roofs, self.args.repetitions, seconds):
                for name, found in beside.items():
                    found += [record[f"roof_{name}"]] if f"roof_{name}" in record else []
                yield record
        if all(beside.values()):
            quartiles = {name: Timing.of(found) for name, found in beside.items()}
            ranges = {name: (t.q1, t.median, t.q3) for name, t in quartiles.items()}
            yield {"kind": "roof_range", **ranges}


def named(text: str) -> list[str]:
    """The formats of --formats; "all" that can be packed. ValueError: an unknown one."""
    if text == "all":
        return [name for name in formats.names() if formats.get(name).packs]
    return [formats.get(n).name for n in parse_names(text)]


def check_formats(names: Iterable[str], ks: Iterable[int]) -> None:
    """ValueError: a format whose block does not divide a K."""
    for name in names:
        block = formats.get(name).block_values
        for k in ks:
            if k % block:
                raise ValueError(f"{name}: K = {k} is not a multiple of its block, {block}")

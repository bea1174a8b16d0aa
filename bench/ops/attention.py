"""`python -m bench attention`: the op on caches of several formats, beside torch's own attention.

Decoding is one query against a filled cache, a prefill several queries behind what is filled. All
variants of a cell are checked, then timed in turns, with the roofs, on caches that rotate. On a CPU
ggml's flash attention joins, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..peers import ggml_attention
from ..problem import Setting
from ..roofs.roof import Roof
from ..timing import Timed, Timing, interleave, wall_clock
from .attention_data import SHORT, Cell, Data, Heads, Variant
from .norm import ratio

MOST_BYTES = {"cpu": 6 << 30, "mps": 6 << 30, "cuda": 32 << 30}  # caches of a cell, without copies
SLOW, FEW = 8.0, 3  # a variant that takes so many times the fastest has few calls on a CPU
Record = dict[str, Any]


def variants(
    data: Data, names: Sequence[str], compile: bool, refused: dict[str, str]
) -> Iterator[Variant]:
    """Ours by the formats, and the peers; what does not run is noted in `refused`."""
    yield from (data.ours(name) for name in names)
    own = data.setting.dtype
    # A CPU's q is f32; f16 and bf16 read half as much and round, as the peers of products do.
    for dtype in (*SHORT,) if data.setting.device.type == "cpu" else (own,):
        for name, variant, why in data.peers(dtype, compile and dtype is own):
            if variant is not None:
                yield variant
            else:
                refused.setdefault(name, why or "")
    why = ggml_attention.missing(data.setting.device)
    for name in names:
        if why is None and name in ggml_attention.TYPES:
            yield data.of_ggml(name)
    if why is not None:
        refused.setdefault("ggml", why)


def measure(
    data: Data, found: Sequence[Variant], roof: Roof, repetitions: int, seconds: float
) -> Iterator[Record]:
    """A record per variant: checked, and timed in turns with the roofs."""
    cell, device = data.cell, data.setting.device
    worst = {v.name: data.worst(v) for v in found}
    right = {v.name: v for v in found if worst[v.name] <= 1}
    times = slow_ones(right) if device.type == "cpu" else {}
    timed: dict[str, Timed] = {
        name: device.timed(v.call, len(data.caches(v.format)))
        for name, v in right.items()
        if name not in times
    }
    times |= interleave({**timed, **roof.timed()}, repetitions, seconds)
    gbs, gflops = roof.reached(times)
    peers = [times[name] for name, v in right.items() if not v.is_ours]
    best = min(peers, key=lambda t: t.median, default=None)
    for v in found:
        record: Record = {"kind": "attention", "system": v.name, "format": v.format}
        record |= {"heads": str(cell.heads), "batch": cell.batch, "queries": cell.queries}
        record |= {"slots": cell.slots, "dtype": SHORT[v.rounds.dtype], "is_ours": v.is_ours}
        record |= {"bytes": cell.cache_bytes(v.format), "worst": worst[v.name]}
        record["ok"] = worst[v.name] <= 1
        if record["ok"]:
            record |= rates(times[v.name], cell, v, gbs, gflops)
            f16 = v.name.removesuffix(v.format) + "f16"
            if best is not None:
                record["of_best"] = ratio(best, times[v.name])
            if v.is_ours and f16 in right:
                record["of_f16"] = ratio(times[f16], times[v.name])
        yield record


def slow_ones(found: Mapping[str, Variant]) -> dict[str, Timing]:
    """Those that take SLOW times as long as the fastest in each of FEW calls, from these."""

    def once(v: Variant) -> float:
        return wall_clock(lambda: v.call(0))

    first = {name: once(v) for name, v in found.items()}
    limit, slow = SLOW * min(first.values(), default=0.0), {}
    for name, t in first.items():
        samples = [t]
        while samples[-1] > limit and len(samples) < FEW:
            samples.append(once(found[name]))
        if min(samples) > limit:
            slow[name] = Timing.of(samples)
    return slow


def rates(t: Timing, cell: Cell, v: Variant, gbs: float, gflops: float) -> Record:
    """Time, and what share of the roofs it reaches."""
    read, computed = cell.cache_bytes(v.format) / t.median / 1e9, cell.flops / t.median / 1e9
    record: Record = {"us": 1e6 * t.median, "us_q1": 1e6 * t.q1, "us_q3": 1e6 * t.q3}
    record["count"] = t.count
    record |= {"gbs": read, "roof_gbs": gbs, "percent_read": 100 * read / gbs}
    return record | {"gflops": computed, "percent_peak": 100 * computed / gflops}


def cells(
    heads: Heads,
    batches: Sequence[int],
    contexts: Sequence[int],
    prefill: int,
    filled: Sequence[int],
) -> list[Cell]:
    """Decoding at each batch and context; a prefill behind each number of filled slots."""
    found = [Cell(heads, b, 1, n) for b in batches for n in contexts]
    return found + [Cell(heads, batches[0], prefill, prefill + n) for n in filled if prefill]


def run(
    wanted: Sequence[Cell],
    names: Sequence[str],
    setting: Setting,
    roof: Roof,
    times: tuple[int, float],
    compile: bool,
    progress: Callable[[str], None],
) -> Iterator[Record]:
    """The records of every cell; what does not run is named at the end."""
    refused: dict[str, str] = {}
    device = setting.device.type
    dense = SHORT if device == "cpu" else (setting.dtype,)
    needed = {*names, *(SHORT[d] for d in dense)}
    for cell in wanted:
        what = f"batch {cell.batch}, {cell.queries} of {cell.slots}"
        size = sum(cell.cache_bytes(name) for name in needed)
        if size > MOST_BYTES[device]:
            why = f"{size / 1e9:.0f} GB of caches; at most {MOST_BYTES[device] / 1e9:.0f}"
            yield {"kind": "skipped", "what": what, "why": why}
            continue
        progress(f"attention: {what}: check")
        data = Data(cell, setting)
        found = [*variants(data, names, compile, refused)]
        progress(f"attention: {what}")
        yield from measure(data, found, roof, *times)
    yield from ({"kind": "skipped", "what": n, "why": why} for n, why in refused.items())

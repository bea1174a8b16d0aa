"""Records (JSON lines) -> tables, for the terminal or as markdown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..tables import ABSENT, Table, digits, percent, print_tables, scientific, to_markdown
from .models import model_tables

Record = dict[str, Any]
# Kinds of cells, and the columns that their tables do without: names of variants have the format.
CELLS: dict[str, set[str]] = {
    "matmul": {"format", "worst"},
    "norm": set(),
    "experts": set(),
    "attention": {"format"},
    "matrix-op": {"format", "m"},
}
# Columns of a table of cells, of which a table has those that its records have: what they are of
# stands before the variant, what was found after it.
Column = tuple[str, str, Callable[[Any], str]]
BEFORE: tuple[Column, ...] = (
    ("format", "format", str),
    ("w", "N×K", str),
    ("m", "M", str),
    ("tokens", "tokens", str),
    ("batch", "batch", str),
    ("slots", "slots", str),
)
AFTER: tuple[Column, ...] = (
    ("bytes", "MB of cache", lambda b: digits(b / 1e6)),
    ("us", "µs", lambda us: digits(us, 4)),
    ("spread", "IQR", str),
    ("gbs", "GB/s", digits),
    ("percent_read", "of read", percent),
    ("gflops", "GFLOP/s", digits),
    ("percent_peak", "of peak", percent),
    ("speedup", "vs F.linear", lambda r: f"{digits(r)}×"),
    ("of_best", "vs best peer", lambda r: f"{digits(r)}×"),
    ("of_f16", "vs f16", lambda r: f"{digits(r)}×"),
    ("of_two_ops", "two ops over it", lambda r: f"{digits(r)}×"),
    ("of_same_work", "linear of the same work over it", lambda r: f"{digits(r)}×"),
    ("of_one_expert", "of one expert over it", lambda r: f"{digits(r)}×"),
    ("of_unfused", "unfused over it", lambda r: f"{digits(r)}×"),
    ("error", "error", scientific),
    ("worst", "of bound", lambda w: percent(100 * w)),
)


def read_records(path: Path) -> list[Record]:
    """The JSON lines of a file. ValueError: a line that is no JSON object."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as e:
            raise ValueError(f"{path}, line {number}: not a JSON object") from e
    return records


def spread(r: Record) -> float:
    """Interquartile range in percent of the median."""
    return float(100 * (r["us_q3"] - r["us_q1"]) / r["us"])


def run_lines(records: Sequence[Record]) -> list[str]:
    """Machine, versions, command and roofs in sentences."""
    out, kinds = [], {r["kind"] for r in records}
    for r in records:
        if r["kind"] == "run":
            cache = r["cache_bytes"] / 2**20
            out += [
                f"{r['date']}, commit {r['commit']}, `{r['command']}`",
                f"{r['machine']}, last-level cache {cache:.0f} MiB, {r['system']}; "
                f"torch {r['torch']}, {r['threads']} threads; "
                f"load average before the run {r['load_before']}",
            ]
            if r["quick"]:
                out.append("--quick: weights are not cold and calls are few; a smoke test only")
        elif r["kind"] == "roof":
            read, fma = (
                ", ".join(f"{digits(rate)} ({name})" for name, rate in r[kind].items())
                for kind in ("read", "fma")
            )
            warning = "" if r["native"] else "; no C++ compiler: these may be too low"
            out.append(f"Roofs at the start: memory GB/s {read}; GFLOP/s {fma}{warning}")
            if all(k in ("run", "roof") for k in kinds):
                out += [
                    f"{rate:8.1f} {'GB/s' if _is_memory(name) else 'GFLOP/s'} {name}"
                    for name, rate in sorted(r["candidates"].items(), key=lambda c: -c[1])
                ]
        elif r["kind"] == "skipped":
            out.append(f"Not run: {r['what']} ({r['why']})")
        elif r["kind"] == "roof_range":
            out.append(
                f"Roofs beside the cells, median (quartiles): memory {_range(r['gbs'])} GB/s, "
                f"{_range(r['gflops'])} GFLOP/s; percentages refer to the cell's own"
            )
        if "first" in r:
            first = ", ".join(f"{v:.6g}" for v in r["first"])
            out.append(f"{r['variant']}: first {first}; checksum {r['checksum']:.9g}")
    return out


def _is_memory(candidate: str) -> bool:
    return not candidate.startswith(("f32 ", "f16 "))


def _range(q: Sequence[float]) -> str:
    return f"{digits(q[1])} ({digits(q[0])}–{digits(q[2])})"


def by_title(records: Iterable[Record], *kinds: str) -> dict[str, list[Record]]:
    out: dict[str, list[Record]] = {}
    for r in records:
        if r["kind"] in kinds:
            out.setdefault(r["title"], []).append(r)
    return out


def cell_tables(records: Sequence[Record], *kinds: str) -> list[Table]:
    """A table for each title, a row for each cell and way."""
    tables = []
    for title, cells in by_title(records, *kinds).items():
        cells = [c | ({"spread": percent(spread(c))} if "us" in c else {}) for c in cells]
        keys = {key for c in cells for key in c} - CELLS[cells[0]["kind"]]
        if cells[0].get("queries") == 1:
            keys -= {"gflops", "percent_peak"}
        before, after = ([c for c in columns if c[0] in keys] for columns in (BEFORE, AFTER))
        table = Table(title, ["variant", *(c[1] for c in (*before, *after))])
        for c in cells:
            row = [c["variant"]]
            for key, _, text in (*before, *after):
                row.append(text(c[key]) if c.get(key) is not None else ABSENT)
            if not c.get("ok", True):
                row[table.columns.index("µs") if "µs" in table.columns else -1] = "WRONG"
            table.rows.append(row)
        tables.append(table)
    return tables


def pivots(records: Sequence[Record], kind: str, over: str) -> list[Table]:
    """A table for each title: a row per variant, µs by `over`; what the cells of a row have at the
    least and at the most M, and the values of M where more rows take less time."""
    tables = []
    for title, found in by_title(records, kind).items():
        values = list(dict.fromkeys(c[over] for c in found))
        values = sorted(values) if over == "m" else values
        columns = [f"{title}, µs at", *(f"M={v}" if over == "m" else str(v) for v in values)]
        rates = [("GB/s", 0, "gbs", digits), ("of read", 0, "percent_read", percent)]
        rates += [("GFLOP/s", -1, "gflops", digits), ("of peak", -1, "percent_peak", percent)]
        more = [rate for rate in rates if rate[2] in found[0]]
        columns += [f"{n} M={values[i]}" if "/s" in n else n for n, i, *_ in more]
        columns.append("worst IQR")
        has_error, falls = "error" in found[0], any("slower_m" in c for c in found)
        columns += ["error"] * has_error + ["time falls at M"] * falls
        table = Table("", columns)
        for name in dict.fromkeys(c["variant"] for c in found):
            cells = {c[over]: c for c in found if c["variant"] == name}
            row = [name, *(_microseconds(cells.get(v)) for v in values)]
            row += [text(cells.get(values[i], {}).get(key)) for _, i, key, text in more]
            spreads = [spread(c) for c in cells.values() if "us" in c]
            row.append(percent(max(spreads)) if spreads else ABSENT)
            if has_error:
                row.append(scientific(max(c["error"] for c in cells.values())))
            if falls:
                row.append(", ".join(str(m) for m, c in cells.items() if "slower_m" in c) or "none")
            table.rows.append(row)
        tables.append(table)
    return tables


def _microseconds(cell: Record | None) -> str:
    if cell is None:
        return ABSENT
    return digits(cell["us"]) if cell.get("ok", True) else "WRONG"


def baseline_table(records: Sequence[Record], baseline: Sequence[Record]) -> Table:
    """Time in units of that run's F.linear, against the same of another run: machines drift."""
    key = ("n", "k", "m", "variant")
    before = {tuple(r[x] for x in key): r["speedup"] for r in baseline if "speedup" in r}
    table = Table("vs baseline", ["variant", "W", "M", "vs F.linear", "baseline", "change"])
    for r in records:
        old = before.get(tuple(r.get(x) for x in key))
        if old is not None and "speedup" in r:
            change = r["speedup"] / old - 1
            where = [r["variant"], f"{r['n']}×{r['k']}", str(r["m"])]
            both = (f"{digits(times)}×" for times in (r["speedup"], old))
            table.rows.append([*where, *both, f"{change:+.0%}"])
    return table


def show(records: Sequence[Record], markdown: bool, baseline: Sequence[Record] = ()) -> None:
    """Prints everything the records hold: of products summaries as markdown, else every cell."""
    tables = pivots(records, "matmul", "m") if markdown else cell_tables(records, "matmul")
    tables += pivots(records, "sweep", "m") + pivots(records, "overhead", "mode")
    tables += cell_tables(records, *[*CELLS][1:]) + model_tables(records)
    if baseline:
        tables.append(baseline_table(records, baseline))
    if markdown:
        print("  \n".join(run_lines(records)), *map(to_markdown, tables), sep="\n\n")
        return
    print(*run_lines(records), sep="\n")
    print_tables(tables)


def print_(args: argparse.Namespace) -> None:
    before = read_records(args.baseline) if args.baseline else ()
    show(read_records(args.file), args.markdown, before)

"""Records (JSON lines) -> tables, for the terminal or as markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..ops import matrix_ops
from ..tables import ABSENT, Table, digits, percent, scientific, to_markdown
from . import cache_tables, serve_tables, token_tables
from .terminal import print_tables

Record = dict[str, Any]
NOISY = 20.0  # percent: interquartile ranges beyond it say that the machine was busy
FULL_COLUMNS = ["variant", "M", "µs", "IQR", "GB/s", "of read", "GFLOP/s", "of peak"]
FULL_COLUMNS += ["vs F.linear", "error"]


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
    return out


def _is_memory(candidate: str) -> bool:
    return not candidate.startswith(("f32 ", "f16 "))


def _range(q: Sequence[float]) -> str:
    return f"{digits(q[1])} ({digits(q[0])}–{digits(q[2])})"


def full_tables(records: Sequence[Record]) -> list[Table]:
    """One table per shape, one row per M and variant."""
    tables: dict[str, Table] = {}
    for r in records:
        if r["kind"] != "matmul":
            continue
        title = f"{r['n']}×{r['k']}"
        table = tables.setdefault(title, Table(f"W {title}", FULL_COLUMNS))
        row = [r["variant"], str(r["m"])]
        if r["ok"]:
            speedup = r.get("speedup")
            row += [
                digits(r["us"], 4),
                percent(spread(r)),
                digits(r["gbs"]),
                percent(r["percent_read"]),
                digits(r["gflops"]),
                percent(r["percent_peak"]),
                ABSENT if speedup is None else f"{digits(speedup)}×",
                scientific(r["error"]),
            ]
        else:
            row += ["WRONG", *[ABSENT] * 6, scientific(r["error"])]
        table.rows.append(row)
    return list(tables.values())


def summary_tables(records: Sequence[Record]) -> list[Table]:
    """One table per shape, a row per variant: ms by M, GB/s at the least M, GFLOP/s at the most."""
    by_shape: dict[str, dict[str, dict[int, Record]]] = {}
    for r in records:
        if r["kind"] == "matmul":
            rows = by_shape.setdefault(f"{r['n']}×{r['k']}", {})
            rows.setdefault(r["variant"], {})[r["m"]] = r
    return [_summary(shape, rows) for shape, rows in by_shape.items()]


def _summary(shape: str, rows: dict[str, dict[int, Record]]) -> Table:
    ms = sorted({m for cells in rows.values() for m in cells})
    first, last = ms[0], ms[-1]
    columns = [f"W {shape}, ms at", *(f"M={m}" for m in ms)]
    columns += [f"GB/s M={first}", "of read", f"GFLOP/s M={last}", "of peak"]
    columns += ["worst IQR", "error"]
    table = Table("", columns)
    for name, cells in rows.items():
        row = [name]
        for m in ms:
            cell = cells.get(m)
            row.append(_milliseconds(cell))
        low, high = cells.get(first, {}), cells.get(last, {})
        row += [digits(low.get("gbs")), percent(low.get("percent_read"))]
        row += [digits(high.get("gflops")), percent(high.get("percent_peak"))]
        spreads = [spread(c) for c in cells.values() if c["ok"]]
        row.append(percent(max(spreads)) if spreads else ABSENT)
        row.append(scientific(max(c["error"] for c in cells.values())))
        table.rows.append(row)
    return table


def _milliseconds(cell: Record | None) -> str:
    if cell is None:
        return ABSENT
    return digits(cell["us"] / 1e3) if cell["ok"] else "WRONG"


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


def sweep_tables(records: Sequence[Record]) -> list[Table]:
    """Time against M: all of it for one variant; for several, times and what was inverted."""
    by_variant: dict[str, list[Record]] = {}
    for r in records:
        if r["kind"] == "sweep":
            by_variant.setdefault(r["variant"], []).append(r)
    if len(by_variant) < 2:
        return [_sweep_table(cells) for cells in by_variant.values()]
    ms = sorted({r["m"] for cells in by_variant.values() for r in cells})
    first = next(iter(by_variant.values()))[0]
    table = Table("", [f"W {first['n']}×{first['k']}, µs at M", *by_variant])
    for m in ms:
        found = [next((r for r in cells if r["m"] == m), None) for cells in by_variant.values()]
        table.rows.append([str(m), *(_microseconds(r) for r in found)])
    table.rows.append(["worst IQR", *(_worst_spread(cells) for cells in by_variant.values())])
    table.rows.append(["time falls at", *(_falls(cells) for cells in by_variant.values())])
    return [table]


def _microseconds(cell: Record | None) -> str:
    if cell is None:
        return ABSENT
    return digits(cell["us"]) if cell["ok"] else "WRONG"


def _worst_spread(cells: Sequence[Record]) -> str:
    spreads = [spread(r) for r in cells if r["ok"]]
    return percent(max(spreads)) if spreads else ABSENT


def _falls(cells: Sequence[Record]) -> str:
    return ", ".join(str(r["m"]) for r in cells if "slower_m" in r) or "none"


def _sweep_table(cells: Sequence[Record]) -> Table:
    """One variant, with the inversions that the quartiles confirm."""
    c = cells[0]
    falls = _falls(cells)
    spreads = sorted(spread(r) for r in cells if r["ok"])
    verdict = "time never falls as M grows" if falls == "none" else f"time falls at M = {falls}"
    if len(spreads) < len(cells):
        verdict = "wrong results are not timed"
    elif spreads[len(spreads) // 2] > NOISY:
        verdict += "; but the machine was too busy to tell"
    title = f"{c['variant']}, W {c['n']}×{c['k']}: {verdict}"
    table = Table(title, ["M", "µs", "IQR", "µs per row", "GFLOP/s", "error", "note"])
    for r in cells:
        if not r["ok"]:
            table.rows.append([str(r["m"]), "WRONG", *[ABSENT] * 3, scientific(r["error"]), ""])
            continue
        note = f"faster than M={r['slower_m']}" if "slower_m" in r else ""
        numbers = [digits(r["us"], 4), percent(spread(r)), digits(r["us"] / r["m"])]
        table.rows.append(
            [str(r["m"]), *numbers, digits(r["gflops"]), scientific(r["error"]), note]
        )
    return table


def overhead_table(records: Sequence[Record]) -> list[Table]:
    """Microseconds per call, a column per gradient mode."""
    cells = [r for r in records if r["kind"] == "overhead"]
    if not cells:
        return []
    modes = list(dict.fromkeys(r["mode"] for r in cells))
    table = Table("", ["µs per call, " + cells[0]["size"], *modes])
    for name in dict.fromkeys(r["call"] for r in cells):
        found = {r["mode"]: r for r in cells if r["call"] == name}
        row = [
            f"{digits(r['us'])} ({digits(r['us_q1'])}–{digits(r['us_q3'])})" if r else ABSENT
            for r in map(found.get, modes)
        ]
        table.rows.append([name, *row])
    return [table]


def quality_tables(records: Sequence[Record]) -> list[Table]:
    """Quality and bytes of the formats, a table per model."""
    tables: dict[str, Table] = {}
    for r in records:
        if r["kind"] != "quality":
            continue
        first = r["model"] not in tables
        columns, numbers = _quality(r)
        title = f"{r['model']}; {numbers[0]}"
        table = tables.setdefault(r["model"], Table(title, ["", "MB", "less than f16", *columns]))
        name = r["variant"]
        others = [f"{100 * v:.0f} % {n}" for n, v in r["formats"].items() if n != name]
        if others and not first:
            name += f" ({', '.join(others)})"
        saved = percent(100 * (1 - r["bytes"] / r["f16_bytes"]))
        table.rows.append([name, digits(r["bytes"] / 1e6), saved, *numbers[1:]])
    return list(tables.values())


def _quality(r: Record) -> tuple[list[str], list[str]]:
    """(columns, [what was measured on, a number for each column])."""
    if "perplexity" in r:
        columns = ["perplexity", "divergence", "same top token"]
        numbers = [
            f"{r['tokens']} tokens",
            f"{r['perplexity']:.2f}",
            f"{r['divergence']:.4f}",
            f"{100 * r['same_top']:.1f} %",
        ]
        if "weighted_error" in r:
            columns += ["weighted error", "bytes as llama.cpp's"]
            numbers.append(f"{r['weighted_error']:.5f}")
            numbers.append("" if r["same_bytes"] is None else f"{100 * r['same_bytes']:.2f} %")
        return columns, numbers
    return ["cosine", "worst", "largest change of a similarity"], [
        f"{r['sentences']} sentences",
        f"{r['cosine']:.5f}",
        f"{r['worst_cosine']:.5f}",
        f"{r['similarity_change']:.4f}",
    ]


def show(records: Sequence[Record], markdown: bool, baseline: Sequence[Record] = ()) -> None:
    """Prints everything the records hold: summaries as markdown, every cell on the terminal."""
    tables = (summary_tables if markdown else full_tables)(records)
    tables += sweep_tables(records) + overhead_table(records) + token_tables.all_tables(records)
    tables += quality_tables(records) + cache_tables.all_tables(records)
    tables += serve_tables.all_tables(records)
    for r in records:
        if r["kind"] == "matrix-op":
            print(*matrix_ops.lines(r), sep="\n")
    if baseline:
        tables.append(baseline_table(records, baseline))
    if markdown:
        print("  \n".join(run_lines(records)), *map(to_markdown, tables), sep="\n\n")
        return
    print(*run_lines(records), sep="\n")
    print_tables(tables)

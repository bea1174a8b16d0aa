"""Records (JSON lines) -> tables, for the terminal or as markdown; columns are declared."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .tables import ABSENT, Record, Table, digits, percent, print_tables, scientific, to_markdown

# A column: the title, which may name fields of the first record; the field or a function of the
# record; the text of its value. A table has the columns that some of its records have.
Column = tuple[str, str | Callable[[Record], Any], Callable[[Any], str]]
TIME_KINDS = ("packed", "ours", "attention", "others")  # of a token's launches, as in shares.py


def times(ratio: float) -> str:
    return f"{digits(ratio)}×"


def with_unit(size: float) -> Callable[[float], str]:
    """Digits in units of so many."""
    return lambda value: digits(value / size)


def whole_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def with_quartiles(title: str, name: str, text: Callable[[float], str] = digits) -> list[Column]:
    """The column of a field, and one of its quartiles."""

    def field(r: Record) -> str | None:
        q1, q3 = r.get(f"{name}_q1"), r.get(f"{name}_q3")
        return None if q1 is None else f"{digits(q1)}–{digits(q3)}"

    return [(title, name, text), ("quartiles", field, str)]


def spread(r: Record) -> float | None:
    """Interquartile range in percent of the median."""
    return 100 * (r["us_q3"] - r["us_q1"]) / r["us"] if "us" in r else None


def error(r: Record) -> str | None:
    return scientific(r["error"]) if r.get("ok", True) else "WRONG"


def microseconds(r: Record, significant: int = 3) -> str | None:
    if not r.get("ok", True):
        return "WRONG"
    return digits(r["us"], significant) if "us" in r else None


def yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def value(r: Record, field: str | Callable[[Record], Any]) -> Any:
    return r.get(field) if isinstance(field, str) else field(r)


def table(title: str, columns: Iterable[Column], records: Sequence[Record]) -> Table:
    """A row for each record. Cells without a value are ABSENT."""
    columns = [c for c in columns if any(value(r, c[1]) is not None for r in records)]
    rows = [
        [ABSENT if (v := value(r, field)) is None else text(v) for _, field, text in columns]
        for r in records
    ]
    first = records[0]
    return Table(title.format(**first), [name.format(**first) for name, *_ in columns], rows)


# ---- cells


def of_many(field: str) -> Callable[[Record], Any]:
    """The field of a record but of one query, which memory bounds."""
    return lambda r: None if r.get("queries") == 1 else r.get(field)


OF_CELLS: tuple[Column, ...] = (
    ("variant", "variant", str),
    ("M", "m", str),
    ("batch", "batch", str),
    ("slots", "slots", str),
    ("MB of cache", "bytes", with_unit(1e6)),
    ("µs", lambda r: microseconds(r, 4), str),
    ("IQR", spread, percent),
    ("GB/s", "gbs", digits),
    ("of read", "percent_read", percent),
    ("GFLOP/s", of_many("gflops"), digits),
    ("of peak", of_many("percent_peak"), percent),
    ("vs F.linear", "speedup", times),
    ("vs best peer", "of_best", times),
    ("vs f16", "of_f16", times),
    ("vs rows", "of_rows", times),
    ("one row over it", "of_one", times),
    ("error", "error", scientific),
    (
        "of bound",
        lambda r: 100 * r["worst"] if "worst" in r and "error" not in r else None,
        percent,
    ),
)


def cell_tables(records: Iterable[Record], pivoted: bool = False) -> list[Table]:
    """A table for each kind and title of cells, a row for each cell and way; of products, if
    `pivoted`, a row for each way."""
    of_title: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        if "title" in r:
            of_title.setdefault((r["kind"], r["title"]), []).append(r)
    return [
        pivot(title, cells) if pivoted and kind == "matmul" else table(title, OF_CELLS, cells)
        for (kind, title), cells in of_title.items()
    ]


def pivot(title: str, found: Sequence[Record]) -> Table:
    """A row per variant, µs by M; what the cells of a row have at the least and at the most M."""
    values = sorted({c["m"] for c in found})
    columns: list[Column] = [(f"{title}, µs at", "variant", str)]
    for v in values:
        columns.append((f"M={v}", lambda r, v=v: microseconds(r["cells"].get(v, {})), str))
    rates = [("GB/s", 0, "gbs", digits), ("of read", 0, "percent_read", percent)]
    rates += [("GFLOP/s", -1, "gflops", digits), ("of peak", -1, "percent_peak", percent)]
    for name, i, field, text in rates:
        name = f"{name} M={values[i]}" if "/s" in name else name
        at = values[i]
        columns.append((name, lambda r, a=at, f=field: r["cells"].get(a, {}).get(f), text))
    columns += [("worst IQR", "spread", percent), ("error", "error", scientific)]
    rows = []
    for name in dict.fromkeys(c["variant"] for c in found):
        cells = {c["m"]: c for c in found if c["variant"] == name}
        row: Record = {"variant": name, "cells": cells}
        for field, of in (("spread", spread), ("error", lambda c: c.get("error"))):
            some = [v for c in cells.values() if (v := of(c)) is not None]
            row[field] = max(some, default=None)
        rows.append(row)
    return table("", columns, rows)


# ---- whole models, caches, serve

SYSTEM: Column = ("system", "system", str)
SHORT = {"attention": "attn"}


def _host(r: Record) -> float:
    """On a CPU what is beside the kernels, else the time until the GPU has been given the step."""
    if r.get("device", "cpu") != "cpu":
        return r["host_ms"]
    return max(0.0, r["ms"] - sum(r[f"{kind}_ms"] for kind in TIME_KINDS))


def _variant(r: Record) -> str:
    """The name of a packed model, and the formats of the layers that have another."""
    name = r["variant"].split(",")[0]
    others = [f"{100 * part:.0f} % {n}" for n, part in r["formats"].items() if n != name]
    return r["variant"] + (f" ({', '.join(others)})" if others else "")


PARTS: tuple[Column, ...] = (
    SYSTEM,
    *with_quartiles("ms", "ms"),
    *((f"{SHORT.get(k, k)} ms", f"{k}_ms", lambda v: digits(v) if v else "0") for k in TIME_KINDS),
    ("host ms", _host, digits),
    *((SHORT.get(k, k), f"{k}_launches", "{:.0f}".format) for k in TIME_KINDS),
    ("passes", "passes", "{:.0f}".format),
)
# {kind of record: title and columns of its tables, one for each model}.
KINDS: dict[str, tuple[str, tuple[Column, ...]]] = {
    "tokens": (
        "{model}, after {context}",
        (
            SYSTEM,
            ("MB", "weight_bytes", with_unit(1e6)),
            *with_quartiles("decode tok/s", "decode"),
            *with_quartiles("prefill {prompt}", "prefill"),
            ("prefill, GPU ms", "prefill_gpu_ms", digits),
            *with_quartiles("by fuse_", "gain", "× {:.3f}".format),
            ("error", error, str),
        ),
    ),
    "layers": (
        "{model}",
        (
            SYSTEM,
            *with_quartiles("µs a layer", "layer_us"),
            ("in ops", "ops_us", digits),
            ("beside", "beside_us", digits),
            ("Python a layer", "python_layer_us", digits),
            ("Python beside", "python_us", digits),
            ("of unfused", "of_unfused", whole_percent),
            *((name.replace("_", " "), name, digits) for name in ("our_ops", "other_ops", "views")),
        ),
    ),
    "ops": (
        "{model}",
        (
            ("family", "family", "`{}`".format),
            *((f"layers {n}", f"layers_{n}", listed) for n in ("before", "after")),
            *((f"beside them {n}", f"beside_{n}", str) for n in ("before", "after")),
        ),
    ),
    "drafts": (
        "{model}",
        (
            ("task", "task", str),
            ("tokens/s without", "plain", digits),
            ("with drafts", "drafted", digits),
            ("speed", "speed", "{:.2f}×".format),
            ("drafted", "drafts", "{:.0f}".format),
            ("right", "share", whole_percent),
            ("tokens equal", "ok", yes),
        ),
    ),
    "families": (
        "{model}",
        (
            ("family", "family", "`{}`".format),
            SYSTEM,
            *with_quartiles("ms", "ms"),
            ("of unfused", "of_unfused", whole_percent),
            ("replays", "replays", str),
            ("ms of a prompt of {prompt}", "prompt_ms", digits),
            ("of unfused", "prompt_of_unfused", whole_percent),
        ),
    ),
    "quality": (
        "{model}; {count}",
        (
            ("", _variant, str),
            ("MB", "bytes", with_unit(1e6)),
            ("less than f16", lambda r: 100 * (1 - r["bytes"] / r["f16_bytes"]), percent),
            ("perplexity", "perplexity", "{:.2f}".format),
            ("divergence", "divergence", "{:.4f}".format),
            ("same top token", "same_top", lambda v: f"{100 * v:.1f} %"),
            ("cosine", "cosine", "{:.5f}".format),
            ("worst", "worst_cosine", "{:.5f}".format),
            ("largest change of a similarity", "similarity_change", "{:.4f}".format),
        ),
    ),
    "cache-quality": (
        "{model}",
        (
            ("cache", "cache", str),
            ("perplexity", "perplexity", "{:.3f}".format),
            ("divergence", "divergence", lambda v: scientific(max(0.0, v))),
            ("same top token", "same_top", lambda v: f"{100 * v:.2f} %"),
            ("equal tokens, {answers} answers of {answer}", "equal", listed),
        ),
    ),
    "serve": (
        "One client, {tokens} tokens",
        (
            ("way", "way", str),
            *with_quartiles("first token, ms", "first_ms"),
            *with_quartiles("tokens/s after it", "tokens_s"),
        ),
    ),
    "serve-turns": (
        "{model}: {clients} conversations of {turns} turns, {tokens} tokens at the end",
        (
            ("server", "way", str),
            *with_quartiles("first token of turn 2, ms", "second"),
            ("tokens read", "read_second", digits),
            *with_quartiles("first token of the last turn, ms", "end"),
            ("tokens read", "read_end", digits),
            ("last / 2", "ratio", "{:.2f}".format),
            *with_quartiles("tokens/s of all", "tokens_s"),
        ),
    ),
    "serve-clients": (
        "{clients} clients, {seconds:.0f} s",
        (
            ("tokens/s of all", "tokens_s", digits),
            ("answers", "answers", str),
            ("errors", "errors", str),
            ("memory before, MB", "resident", with_unit(1e6)),
            ("growth, MB", lambda r: r["growth"] / 1e6, "{:.1f}".format),
        ),
    ),
}


def model_tables(records: Sequence[Record]) -> list[Table]:
    """The tables of all kinds of records here, and where a token's time goes."""
    tables: list[Table] = []
    of_models: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        if r["kind"] in KINDS:
            key = (r["kind"], r.get("model"), r.get("context"))
            of_models.setdefault(key, []).append(r)
    for (kind, *_), cells in of_models.items():
        made = table(*KINDS[kind], cells)
        tables.append(made.joined() if kind == "ops" else made)
        if with_parts := [r for r in cells if "packed_launches" in r]:
            title = "{model}: ms of a token after {context}, and launches"
            tables.append(table(title, PARTS, with_parts))
    return tables


# ---- a run


def read_records(path: Path) -> list[Record]:
    """The JSON lines of a file. ValueError: a line that is no JSON object."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as e:
            raise ValueError(f"{path}, line {number}: not a JSON object") from e
    return records


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
            if kinds <= {"run", "roof"}:
                for name, rate in sorted(r["candidates"].items(), key=lambda c: -c[1]):
                    kind = "GFLOP/s" if name.startswith(("f32 ", "f16 ")) else "GB/s"
                    out.append(f"{rate:8.1f} {kind} {name}")
        elif r["kind"] == "skipped":
            out.append(f"Not run: {r['what']} ({r['why']})")
        elif r["kind"] == "roof_range":
            memory, peak = (
                f"{digits(q[1])} ({digits(q[0])}–{digits(q[2])})" for q in (r["gbs"], r["gflops"])
            )
            out.append(
                f"Roofs beside the cells, median (quartiles): memory {memory} GB/s, "
                f"{peak} GFLOP/s; percentages refer to the cell's own"
            )
    return out


def show(records: Sequence[Record], markdown: bool) -> None:
    """Prints everything the records hold: of products summaries as markdown, else every cell."""
    tables = cell_tables(records, pivoted=markdown) + model_tables(records)
    if markdown:
        print("  \n".join(run_lines(records)), *map(to_markdown, tables), sep="\n\n")
        return
    print(*run_lines(records), sep="\n")
    print_tables(tables)


def print_(args: argparse.Namespace) -> None:
    show(read_records(args.file), args.markdown)

"""Records of attention on caches, and of tokens by the cache -> tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ops.attention import FEW
from ..tables import ABSENT, Table, digits, percent, scientific
from . import token_tables

Record = dict[str, Any]


def all_tables(records: Sequence[Record]) -> list[Table]:
    tables = attention_tables(records) + context_tables(records) + bytes_table(records)
    return tables + quality_tables(records) + growth_table(records)


def context_tables(records: Sequence[Record]) -> list[Table]:
    """For each model, ms of a token after each context, and where they go after the longest."""
    tables = []
    for model, cells in token_tables.by_model(records, "context").items():
        tables.append(_contexts(model, cells))
        parts = [r for r in cells if "packed_launches" in r]
        if parts:
            tables.append(token_tables.parts_table(model, parts))
    return tables


def _contexts(model: str, cells: Sequence[Record]) -> Table:
    contexts = list(dict.fromkeys(r["context"] for r in cells))
    columns = ["system"]
    for context in contexts:
        columns += [f"ms after {context}", "quartiles", "speed"]
    table = Table(f"{model}: speed by DynamicCache's, or StaticCache's", [*columns, "error"])
    for system in dict.fromkeys(r["system"] for r in cells):
        row, found = [system], [r for r in cells if r["system"] == system]
        for context in contexts:
            of = [r for r in found if r["context"] == context]
            row += _step(of[0]) if of else [ABSENT] * 3
        wrong = not all(r["ok"] for r in found)
        table.rows.append([*row, "WRONG" if wrong else scientific(max(r["error"] for r in found))])
    return table


def _step(r: Record) -> list[str]:
    quartiles = f"{digits(r['ms_q1'])}–{digits(r['ms_q3'])}"
    return [digits(r["ms"]), quartiles, _speed(r["gain"]) if "gain" in r else ""]


def bytes_table(records: Sequence[Record]) -> list[Table]:
    """Bytes of a token and of contexts, by the format."""
    cells = [r for r in records if r["kind"] == "cache-bytes"]
    if not cells:
        return []
    sizes = [*cells[0]["sizes"]]
    columns = ["cache", "kB a token", *(f"GB of {int(s) // 1024}k tokens" for s in sizes)]
    table = Table("Llama 3.1 8B: keys and values", [*columns, "of f16"])
    f16 = next((r["token"] for r in cells if r["format"] == "f16"), None)
    for r in cells:
        row = [r["format"], digits(r["token"] / 1e3), *(digits(r["sizes"][s] / 1e9) for s in sizes)]
        table.rows.append([*row, ABSENT if f16 is None else percent(100 * r["token"] / f16)])
    return [table]


def quality_tables(records: Sequence[Record]) -> list[Table]:
    """What a model predicts with each cache, and how long its greedy answers are the same."""
    cells = [r for r in records if r["kind"] == "cache-quality"]
    if not cells:
        return []
    answers = len(cells[0]["equal"])
    columns = ["cache", "perplexity", "divergence", "same top token"]
    columns.append(f"equal tokens, {answers} answers of {cells[0]['answer']}")
    table = Table(cells[0]["model"], columns)
    for r in cells:
        row = [r["cache"], f"{r['perplexity']:.3f}", scientific(max(0.0, r["divergence"]))]
        row += [f"{100 * r['same_top']:.2f} %", ", ".join(map(str, r["equal"]))]
        table.rows.append(row)
    return [table]


def growth_table(records: Sequence[Record]) -> list[Table]:
    """How much a process grew, beside the bytes that its cache has at the end."""
    cells = [r for r in records if r["kind"] == "cache-growth"]
    if not cells:
        return []
    columns = ["cache", "growth, MB", "tensors of the cache, MB", "growth of tensors"]
    table = Table(f"A process that decodes {cells[0]['tokens']} tokens", columns)
    for r in cells:
        megabytes = [digits(r[name] / 1e6) for name in ("growth", "cache_bytes")]
        row = [r["cache"], *megabytes, percent(100 * r["growth"] / r["cache_bytes"])]
        table.rows.append(row)
    return [table]


def attention_tables(records: Sequence[Record]) -> list[Table]:
    """Decoding and prefills, a row for each cell and system."""
    cells = [r for r in records if r["kind"] == "attention"]
    decoding = [r for r in cells if r["queries"] == 1]
    prefills = [r for r in cells if r["queries"] > 1]
    return [_attention(found) for found in (decoding, prefills) if found]


def _attention(cells: Sequence[Record]) -> Table:
    first = cells[0]
    queries = first["queries"]
    what = f"{queries} queries" if queries > 1 else "one query"
    columns = ["system", "batch", "slots", "MB of cache", "µs", "IQR"]
    if queries > 1:
        columns += ["GFLOP/s", "of peak"]
    else:
        columns += ["GB/s", "of read"]
    columns += ["vs best peer", "vs f16", "error of bound"]
    table = Table(f"Attention of {first['heads']}, {what}", columns)
    for r in cells:
        row = [r["system"], str(r["batch"]), str(r["slots"]), digits(r["bytes"] / 1e6)]
        if "us" in r:
            spread = percent(100 * (r["us_q3"] - r["us_q1"]) / r["us"])
            row += [digits(r["us"]), spread if r["count"] > FEW else f"{r['count']} calls"]
            if queries > 1:
                row += [digits(r["gflops"]), percent(r["percent_peak"])]
            else:
                row += [digits(r["gbs"]), percent(r["percent_read"])]
            row += [_speed(r.get(name)) for name in ("of_best", "of_f16")]
        else:
            row += ["WRONG", *[ABSENT] * 5]
        table.rows.append([*row, percent(100 * r["worst"])])
    return table


def _speed(quartiles: Sequence[float] | None) -> str:
    """How many times the speed; the quartiles are in the records."""
    return ABSENT if quartiles is None else f"{quartiles[1]:.2f}×"

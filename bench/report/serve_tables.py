"""Records of `serve` -> tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tables import Table, digits

Record = dict[str, Any]


def all_tables(records: Sequence[Record]) -> list[Table]:
    """One client beside generate(), then several at once."""
    tables = []
    cells = [r for r in records if r["kind"] == "serve"]
    if cells:
        columns = ["way", "first token, ms (quartiles)", "tokens/s after it (quartiles)"]
        table = Table(f"One client, {cells[0]['tokens']} tokens", columns)
        for r in cells:
            first = f"{digits(r['first_ms'])} ({digits(r['first_q1'])}-{digits(r['first_q3'])})"
            low, high = digits(r["tokens_s_q1"]), digits(r["tokens_s_q3"])
            table.rows.append([r["way"], first, f"{digits(r['tokens_s'])} ({low}-{high})"])
        tables.append(table)
    for r in (r for r in records if r["kind"] == "serve-clients"):
        columns = ["tokens/s of all", "answers", "errors", "memory before, MB", "growth, MB"]
        table = Table(f"{r['clients']} clients, {r['seconds']:.0f} s", columns)
        memory = [digits(r["resident"] / 1e6), f"{r['growth'] / 1e6:.1f}"]
        table.rows.append([digits(r["tokens_s"]), str(r["answers"]), str(r["errors"]), *memory])
        tables.append(table)
    return tables

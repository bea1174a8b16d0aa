"""Tables, the numbers in them, the blocks of a page that hold them, and what a terminal shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ABSENT = "–"
Record = dict[str, Any]  # a measurement, as a line of --json


@dataclass
class Table:
    """Left-aligned first column, numbers in the others."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def joined(self) -> Table:
        """Rows that are equal behind their first cell as one, with the first cells of all."""
        firsts: dict[tuple[str, ...], list[str]] = {}
        for first, *cells in self.rows:
            firsts.setdefault(tuple(cells), []).append(first)
        return replace(self, rows=[[", ".join(f), *cells] for cells, f in firsts.items()])


def digits(value: float | None, significant: int = 3) -> str:
    """12345 -> "12345", 1.2345 -> "1.23", 0.01449 -> "0.0145"; ABSENT for None."""
    if value is None:
        return ABSENT
    # The magnitude is the rounded value's: 9.996 has two digits before the point.
    exponent = int(f"{value:.{significant - 1}e}".partition("e")[2])
    return f"{value:.{max(0, significant - 1 - exponent)}f}"


def percent(value: float | None) -> str:
    """Whole percents, one significant digit below 1 %."""
    if value is None:
        return ABSENT
    return f"{digits(value, 1) if abs(value) < 1 else f'{value:.0f}'} %"


def scientific(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def to_markdown(table: Table) -> str:
    lines = [f"**{table.title}**", ""] if table.title else []
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|---|" + "---:|" * (len(table.columns) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines)


def _block(text: str, command: str) -> tuple[int, int]:
    """Where in a page the block that `python -m bench command` prints begins and ends."""
    begin = f"<!-- python -m bench {command} -->\n"
    return text.index(begin) + len(begin), text.index(f"\n<!-- end of {command} -->")


def read_block(page: Path, command: str) -> str:
    """The block of a page that `python -m bench command` prints."""
    text = page.read_text()
    return text[slice(*_block(text, command))]


def replace_block(page: Path, command: str, block: str) -> None:
    text = page.read_text()
    begin, end = _block(text, command)
    page.write_text(text[:begin] + block + text[end:])


# ---- terminal


def status(text: str) -> None:
    """Progress, on stderr; one line that is overwritten on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def print_tables(tables: Sequence[Table]) -> None:
    """By rich; as markdown where it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(*map(to_markdown, tables), sep="\n\n")
        return
    width = None if sys.stdout.isatty() else 140
    # Text as it is: names in a record of others may look like rich's markup.
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for t in tables:
        rich = RichTable(title=t.title or None, title_justify="left")
        for i, column in enumerate(t.columns):
            rich.add_column(column, justify="right" if i else "left", no_wrap=True)
        for row in t.rows:
            rich.add_row(*row)
        console.print(rich)

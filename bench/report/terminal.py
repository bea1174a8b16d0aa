"""What a run shows on the terminal: its progress, and the tables at its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..tables import Table, to_markdown


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

"""`metalmm info`: versions and the formats, without importing torch."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__


def format_rows() -> Iterator[dict[str, Any]]:
    """Every format: its name, layout, values and bytes of a block; affine ones of f16 scales."""
    from .. import _C  # behind the versions, which are printed where it does not load

    for row in _C.formats():
        if row["layout"] != "affine" or not row["name"].endswith(("_bf16", "_f32")):
            yield row


def bits_per_weight(row: dict[str, Any]) -> str:
    return f"{8 * row['block_bytes'] / row['block_values']:g}"


def versions() -> Iterator[str]:
    """Two lines: of this package, torch and Python; of the system."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    yield f"torch_metalmm {__version__}, torch {torch}, Python {sys.version.split()[0]}"
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.platform()
    yield f"{system}, {platform.machine()}, {os.cpu_count()} CPUs"


def lines() -> Iterator[str]:
    """The lines that the command prints."""
    yield from versions()
    yield "what runs on this machine, and whether it is right: metalmm doctor"
    yield ""
    rows = [("format", "bits/weight", "block", "bytes", "layout")]
    for f in format_rows():
        sizes = str(f["block_values"]), str(f["block_bytes"])
        rows.append((f["name"], bits_per_weight(f), *sizes, f["layout"]))
    yield from _aligned(rows)
    yield "affine formats also exist with bf16 or f32 scales: affine4_g64_bf16, affine4_g64_f32"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < len(row) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

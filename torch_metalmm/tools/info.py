"""`metalmm info`: versions and the formats, without importing torch."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .. import __version__

_TABLE = Path(__file__).parents[1] / "formats.def"  # metal/formats.def, by a link
_ROW = re.compile(r"^MM_(DENSE|BLOCK|AFFINE) *\((.*)\)$", re.M)
_GROUPS = (32, 64, 128)
_SCALE_AND_BIAS = 4  # bytes, both f16


class FormatRow(NamedTuple):
    """A format: its values and bytes a block, and how blocks lie in a row."""

    name: str
    block_values: int
    block_bytes: int
    layout: str


def format_rows() -> Iterator[FormatRow]:
    """Every format of the table, the affine ones with f16 scales."""
    for kind, row in _ROW.findall(_TABLE.read_text()):
        name, _, *sizes = (field.strip() for field in row.split(","))
        if kind == "DENSE":
            yield FormatRow(name, 1, int(sizes[0]), "dense")
        elif kind == "BLOCK":
            yield FormatRow(name, int(sizes[0]), int(sizes[1]), "block")
        else:
            for group in _GROUPS:
                codes = group * int(sizes[0]) // 8
                yield FormatRow(f"{name}_g{group}", group, codes + _SCALE_AND_BIAS, "affine")


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
    """What the command prints."""
    rows = [("format", "bits/weight", "block", "bytes", "layout")]
    for f in format_rows():
        bits = f"{8 * f.block_bytes / f.block_values:g}"
        rows.append((f.name, bits, str(f.block_values), str(f.block_bytes), f.layout))
    yield from _aligned(rows)
    yield "affine formats also exist with bf16 or f32 scales: affine4_g64_bf16, affine4_g64_f32"
    yield ""
    yield from versions()
    yield "what runs on this machine, and whether it is right: metalmm doctor"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < len(row) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

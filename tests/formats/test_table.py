"""The table of formats is written once, in metal/formats.def; everything else agrees with it."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from inputs import random_weight
from places import ROOT
from plan_cases import format_rows

from torch_metalmm import _C, formats
from torch_metalmm.tools.format_table import markdown

pytestmark = pytest.mark.quick

GROUPS = (32, 64, 128)
SCALES = {"": 2, "_bf16": 2, "_f32": 4}  # suffix: bytes of a scale and of a bias


class Row(NamedTuple):
    name: str
    layout: str
    block_values: int
    block_bytes: int


def table() -> list[Row]:
    """The formats of formats.def, affine rows expanded by group and type of the scales."""
    rows = []
    for name, (kind, numbers) in format_rows().items():
        if kind == "DENSE":
            rows.append(Row(name, "dense", 1, numbers[0]))
        elif kind == "BLOCK":
            rows.append(Row(name, "block", *numbers[:2]))
        else:
            assert kind == "AFFINE", kind
            rows += [
                Row(f"{name}_g{group}{suffix}", "affine", group, group * numbers[0] // 8 + 2 * size)
                for group in GROUPS
                for suffix, size in SCALES.items()
            ]
    return rows


TABLE = table()


def native() -> list[Row]:
    return [Row(f["name"], f["layout"], f["block_values"], f["block_bytes"]) for f in _C.formats()]


def specification() -> list[Row]:
    rows = []
    for name in formats.names():
        f = formats.get(name)
        kind = "affine" if isinstance(f, formats.Affine) else "block"
        rows.append(
            Row(f.name, "dense" if f.block_values == 1 else kind, f.block_values, f.block_bytes)
        )
    return rows


def test_the_table_is_read_whole() -> None:
    """Every line that begins with MM_ is a row, an affine one of every group and type of scales."""
    text = (ROOT / "metal" / "formats.def").read_text()
    rows, affine = (re.findall(rf"^MM_{kind}", text, re.M) for kind in ("", "AFFINE"))
    assert len(TABLE) == len(rows) + len(affine) * (len(GROUPS) * len(SCALES) - 1)
    assert len({r.name for r in TABLE}) == len(TABLE)


def test_the_native_module_has_the_formats_of_the_table() -> None:
    assert native() == TABLE


def test_the_native_module_has_the_dtypes_of_the_specification() -> None:
    assert {n: str(d).removeprefix("torch.") for n, d in formats.DTYPES.items()} == _C.DTYPES


def test_the_specification_has_the_formats_of_the_table() -> None:
    assert specification() == TABLE


def test_rows_of_bytes_agree() -> None:
    """The ops' row_bytes and the specification's, for many K of each format."""
    for row in TABLE:
        assert formats.get(row.name).bits_per_weight == 8 * row.block_bytes / row.block_values
        for blocks in (0, 1, 2, 3, 4, 5, 7, 8, 33):
            k = blocks * row.block_values
            size = formats.get(row.name).row_bytes(k)
            unpadded = blocks * row.block_bytes
            assert size == (-(-unpadded // 16) * 16 if row.layout == "affine" else unpadded)
            w = random_weight(row.name, 1, k)
            assert torch.ops.metalmm.dequantize(w, row.name, k).shape == (1, k)
            if formats.get(row.name).packs:
                source = torch.zeros(1, k)
                assert torch.ops.metalmm.quantize(source, row.name).shape == (1, size)


def test_the_native_module_packs_what_the_specification_packs() -> None:
    packs = {f["name"]: f["packs"] for f in _C.formats()}
    assert packs == {name: formats.get(name).packs for name in formats.names()}


PAGE = (ROOT / "docs" / "guide" / "formats.md").read_text("utf-8")


def test_the_page_has_the_formats_of_the_table() -> None:
    assert f"<!-- formats -->\n{markdown().strip()}\n<!-- /formats -->" in PAGE
    for suffix in SCALES:
        assert f"`affine4_g64{suffix}`" in PAGE

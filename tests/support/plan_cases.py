"""The tables that plans are made of, read from their files, for the tests."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from places import ROOT

from torch_metalmm import _C, formats

# Every generation and every class; shapes of the layers of Llama and of vocabularies.
CHIPS = (
    *("m1", "m1-max", "m1-ultra", "m2-pro", "m2-ultra"),
    *("m3", "m3-ultra", "m4-pro", "m4-max", "m5"),
)
NKS = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096)),
    *((32000, 4096), (128256, 4096)),
)
MS = (1, 2, 4, 8, 16, 32, 128, 511, 512, 513)
DTYPES = tuple(formats.DTYPES)
# {bytes that blocks of 2-byte fields are read by: the bits of `bounds`}
_WORDS, _LONGS = (_C.BOUNDS_BITS[name] for name in ("word_blocks", "long_blocks"))
WIDTH_BITS = {2: 0, 4: _WORDS, 8: _WORDS | _LONGS}


def strategy_rows() -> dict[str, str]:
    """{strategy: family} of strategies.def, without aliases."""
    text = (ROOT / "metal" / "strategies.def").read_text()
    return dict(re.findall(r"^MM_STRATEGY\((\w+),\s*(\w+)", text, re.M))


@cache
def format_rows() -> dict[str, tuple[str, list[int]]]:
    """{name: (DENSE, BLOCK or AFFINE, the numbers behind its struct)} of formats.def."""
    text = (ROOT / "metal" / "formats.def").read_text()
    rows = re.findall(r"^MM_([A-Z]+) *\((\w+), *\w+,([^)]*)\)", text, re.M)
    return {name: (kind, [int(n) for n in numbers.split(",")]) for kind, name, numbers in rows}


def codecs() -> list[str]:
    """The names of formats.def: of an affine row without group and type of scales."""
    return list(format_rows())


def pieces() -> dict[str, int]:
    """{name of formats.def: values of K that a lane of gemv takes at a step}."""
    return {n: row[3 if kind == "BLOCK" else 1] for n, (kind, row) in format_rows().items()}


def weaves() -> dict[str, int]:
    """{block format of formats.def: values among which runs of neighbouring pieces interleave}."""
    return {n: row[4] for n, (kind, row) in format_rows().items() if kind == "BLOCK"}


def stored() -> list[str]:
    """The formats that a shader quantizes."""
    rows = format_rows().items()
    return [n for n, (kind, row) in rows if kind == "DENSE" or (kind == "BLOCK" and row[-1])]


def formats_of(strategy: str) -> list[str]:
    """The formats in the names of its kernels; none where they have none."""
    families = {"Matmul": codecs, "Rows": codecs, "Append": stored, "Attention": stored}
    return families.get(strategy_rows()[strategy], list)()


STRATEGIES = list(strategy_rows())


def dtypes_of(strategy: str) -> tuple[str, ...]:
    """The dtypes of x that the strategy has kernels for."""
    return ("f16", "f32") if strategy_rows()[strategy] == "Arrange" else DTYPES


def strategy_of(kernel: str) -> str:
    return max((s for s in STRATEGIES if kernel.startswith(s + "_")), key=len)


def strategies_used(plan: dict[str, Any]) -> list[str]:
    """The strategy of every pass."""
    return [strategy_of(one["kernel"]) for one in plan["passes"]]

"""The tables that plans are made of, read from their files, for the tests."""

from __future__ import annotations

import re
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


def codecs() -> list[str]:
    """The names of formats.def: of an affine row without group and type of scales."""
    text = (ROOT / "metal" / "formats.def").read_text()
    return re.findall(r"^MM_(?:DENSE|BLOCK|AFFINE)\s*\((\w+)", text, re.M)


def pieces() -> dict[str, int]:
    """{name of formats.def: values of K that a lane of gemv takes at a step}."""
    return _column({"DENSE": 2, "BLOCK": 4, "AFFINE": 2})


def weaves() -> dict[str, int]:
    """{block format of formats.def: values among which runs of neighbouring pieces interleave}."""
    return _column({"BLOCK": 5})


def _column(behind: dict[str, int]) -> dict[str, int]:
    """{name: a number of its row}. behind: how many columns behind the name, by the kind of row."""
    text = (ROOT / "metal" / "formats.def").read_text()
    rows = re.findall(rf"^MM_({'|'.join(behind)}) *\((\w+),(.*)\)$", text, re.M)
    return {name: int(row.split(",")[behind[kind]]) for kind, name, row in rows if row[0] == " "}


def stored() -> list[str]:
    """The formats that a shader quantizes."""
    text = (ROOT / "metal" / "formats.def").read_text()
    return re.findall(r"^MM_(?:DENSE \((?=.*)|BLOCK \((?=.*, 1\)$))(\w+)", text, re.M)


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

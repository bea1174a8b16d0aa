"""The names that plans give to what metal/abi.h numbers, and the properties of strategies."""

from __future__ import annotations

import re
import struct

import pytest
from places import ROOT
from plan_cases import STRATEGIES, dtypes_of, formats_of

from torch_metalmm import _C

ABI = (ROOT / "metal" / "abi.h").read_text()


def numbered(names: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("enum", "prefix", "names"),
    [
        ("Slot", "kSlot", numbered(_C.SLOTS)),
        ("FunctionConstant", "kConstant", numbered(_C.CONSTANTS)),
        ("EpilogueBits", "kEpilogue", _C.EPILOGUE_BITS),
        ("ExpertBits", "kExpert", _C.EXPERT_BITS),
        ("RopeBits", "kRope", _C.ROPE_BITS),
        ("BoundsBits", "kBounds", _C.BOUNDS_BITS),
    ],
)
def test_names_are_those_of_the_enumerators(enum: str, prefix: str, names: dict[str, int]) -> None:
    """kBoundsAlignedX = 8 is "aligned_x": 8."""
    body = re.search(rf"enum {enum} : MM_U32 {{(.*?)}};", ABI, re.S)
    assert body is not None
    found = {
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): int(value)
        for name, value in re.findall(rf"\b{prefix}(\w+) = (\d+)", body[1])
    }
    found.pop("count", None)
    assert found == names


def test_names_of_the_types_of_scales() -> None:
    body = re.search(r"enum class ScaleType : MM_U32 {(.*?)}", ABI)
    assert body is not None
    assert tuple(name.lower() for name in re.findall(r"\bk(\w+)", body[1])) == _C.SCALE_TYPES


def test_the_layout_of_the_arguments() -> None:
    """As many fields as plans name, in the types that the header gives them."""
    body = re.search(r"struct KernelArgs {(.*?)\n};", ABI, re.S)
    assert body is not None
    codes, names = "", []
    for kind, fields in re.findall(r"^  (MM_\w+|float) ([\w, ]+);", body[1], re.M):
        names += fields.split(", ")
        codes += {"MM_I64": "q", "MM_U32": "I", "float": "f"}[kind] * len(fields.split(", "))
    one = _C.plan(chip="m1", format="f32")["passes"][0]
    assert names == list(one["args"])
    assert "<" + codes == _C.ARGS_LAYOUT
    assert struct.calcsize(_C.ARGS_LAYOUT) % 8 == 0


def test_properties_of_strategies() -> None:
    """The tiles of the matrix unit round f16 weights; batches and kernels as plans have them."""
    rows = {name: _C.strategy(name) for op in _C.ops() for name in _C.strategies(op)}
    tiles = {name for name, row in rows.items() if row["on_matrix_unit"]}
    assert tiles == {"gemm_small", "gemm", "expert_gemm"}
    assert tiles == {name for name, row in rows.items() if row["rounds_to_half"]}
    for name in _C.strategies("linear"):
        one = _C.plan(m=7, n=9, k=64, format="q8_0", chip="m1", strategy=name)["passes"][0]
        if name != "split_reduce":
            assert (one["constants"]["batch"] > 0) == rows[name]["takes_batch"]
            assert one["kernel"] == f"{rows[name]['kernels']}_q8_0_f16"
    own = {name for name, row in rows.items() if row["kernels"] == name}
    # The second pass of both of attention; the first of gemm_small.
    assert own | {"attention_join", "arrange_x"} == {*STRATEGIES}


def test_kernel_names() -> None:
    """The names are strategies.def times formats.def times the dtypes, of Halves f16 alone."""
    names = _C.kernel_names()
    assert len(names) == len(set(names))
    assert set(names) == {
        f"{strategy}{middle}_{dtype}"
        for strategy in STRATEGIES
        for middle in [f"_{name}" for name in formats_of(strategy)] or [""]
        for dtype in dtypes_of(strategy)
    }

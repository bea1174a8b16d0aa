"""The names that plans give to what metal/abi.h numbers, and the properties of strategies."""

from __future__ import annotations

import re
import struct

from places import ROOT
from plan_cases import STRATEGIES, dtypes_of, formats_of

from torch_metalmm import _C


def test_what_the_header_numbers() -> None:
    """kBoundsAlignedX = 8 of BoundsBits, slots and constants in order, all fields of a struct."""
    assert _C.BOUNDS_BITS["aligned_x"] == 8 and _C.TABLE_BITS["axes"] == 4
    assert len(_C.SLOTS) == 16 and _C.SLOTS[4:7] == ("c", "weight2", "x2")
    assert _C.CONSTANTS[1:] == ("group", "scale_type", "epilogue", "batch", "bounds")
    one = _C.plan(chip="m1", format="f32")["passes"][0]
    assert len(one["args"]) == len(_C.ARGS_LAYOUT) - 1
    assert [*one["args"]][12:15] == ["x2_sequence_stride", "m", "n"]
    assert struct.calcsize(_C.ARGS_LAYOUT) % 8 == 0


def test_names_of_the_types_of_scales() -> None:
    header = (ROOT / "metal" / "abi.h").read_text()
    body = re.search(r"enum class ScaleType : MM_U32 {(.*?)}", header)
    assert body is not None
    assert tuple(name.lower() for name in re.findall(r"\bk(\w+)", body[1])) == _C.SCALE_TYPES


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
    """The names are strategies.def times formats.def times the dtypes, of Arrange not bf16."""
    names = _C.kernel_names()
    assert len(names) == len(set(names))
    assert set(names) == {
        f"{strategy}{middle}_{dtype}"
        for strategy in STRATEGIES
        for middle in [f"_{name}" for name in formats_of(strategy)] or [""]
        for dtype in dtypes_of(strategy)
    }

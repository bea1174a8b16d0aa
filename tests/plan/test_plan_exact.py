"""Plans of rows that have the bits of single ones."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import CHIPS, DTYPES, NKS, strategy_of

from torch_metalmm import _C

pytestmark = pytest.mark.quick
MOST = 8
M_TAIL = 2  # kBoundsM of abi.h
SHARED = "gemv_large_k"  # simdgroups share K of a row
# Those of a row alone, and what reads W once for several with the bits of that.
OF_SEVERAL = {"gemv": "gemv_batched", "gemv_wide_n": "gemv_batched", SHARED: SHARED}


@pytest.mark.parametrize("chip", [*CHIPS, _C.CUDA])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["q4_0", "q4_k", "f16", "affine4_g64"])
def test_rows_are_planned_as_the_row_alone(chip: str, dtype: str, format: str) -> None:
    for n, k in (*NKS, (64, 65536)):  # of which K is cut
        sizes = {"n": n, "k": k, "format": format, "dtype": dtype, "chip": chip}
        alone = _C.plan(m=1, **sizes)
        wanted = OF_SEVERAL[strategy_of(alone["passes"][0]["kernel"])]
        for m in range(2, MOST + 1):
            plan = _C.plan(m=m, exact_rows=True, **sizes)
            passes = plan["passes"][plan["main"] :]
            assert strategy_of(passes[0]["kernel"]) == wanted and not plan["dense"]
            for one, of_one in zip(passes, alone["passes"], strict=True):
                assert all(
                    one["args"][key] == of_one["args"][key] for key in ("parts", "k_per_part")
                )
        for m in (1, MOST + 1):
            assert _C.plan(m=m, exact_rows=True, **sizes) == _C.plan(m=m, **sizes)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("group", [1, 4, 32])
def test_a_query_has_its_own_parts(chip: str, group: int) -> None:
    """A threadgroup has rows of one query; parts and kernels are those of the query alone."""
    sizes = {"batch": 2, "heads": 8 * group, "kv_heads": 8, "head_stride": 1 << 20}
    sizes |= {"sequence_stride": 1 << 24, "head2_stride": 1 << 20, "sequence2_stride": 1 << 24}

    def passes(queries: int, exact: bool, **others: Any) -> list[dict[str, Any]]:
        asked = sizes | {"queries": queries} | others
        given = {"n": 4096, "k": 128, "format": "q8_0", "chip": chip, "exact_rows": exact}
        return list(_C.plan("attention", **given, attention=asked)["passes"])

    alone, several = passes(1, False), passes(4, True)
    for one, of_four in zip(alone, several, strict=True):
        assert one["kernel"] == of_four["kernel"]
        x, y, z = one["grid"]
        assert of_four["grid"] == ([4 * x, y, z] if "join" in one["kernel"] else [x, y, 4 * z])
    bits = several[0]["constants"]["epilogue"]
    assert bits & _C.ATTENTION_BITS["alone"] and not bits & _C.ATTENTION_BITS["causal"]
    assert passes(1, True) == alone
    with pytest.raises(ValueError, match="exact_rows: 4 queries with a mask"):
        passes(4, True, bool_mask=True)
    with pytest.raises(ValueError, match="exact_rows: 4 queries with a mask"):
        passes(4, True, causal=False)


@pytest.mark.parametrize("m", range(2, MOST + 1))
def test_passes_of_two_rows_where_lines_of_x_bound_an_nvidia_gpu(m: int) -> None:
    """Affine formats, and x in f32 where a lane owns 32 values and x is not arranged, as with a
    norm; a last pass may have one row."""
    cells = [("affine4_g64", "f16", False, 2), ("q4_k", "f32", True, 2), ("q4_k", "f16", True, 4)]
    cells += [("q4_0", "f32", True, 8), ("affine4_g64", "f32", False, 2), ("q4_k", "f32", False, 4)]
    for format, dtype, norm, most in cells:
        sizes = {"n": 14336, "k": 4096, "format": format, "dtype": dtype, "norm": norm}
        for chip, rows in ((_C.CUDA, most), ("m4-max", 8 if format == "q4_0" else 4)):
            plan = _C.plan(m=m, strategy="gemv_batched", chip=chip, **sizes)
            one = plan["passes"][plan["main"]]
            passes, batch = one["grid"][0], one["constants"]["batch"]
            assert passes == -(-m // rows) and batch == -(-m // passes)
            assert bool(one["constants"]["bounds"] & M_TAIL) == (passes * batch > m)


@pytest.mark.parametrize(
    ("format", "each"), [("q4_0", 128), ("q4_k", 128), ("q4_1", 64), ("affine4_g64", 64)]
)
def test_few_floats_are_read_as_they_lie(format: str, each: int) -> None:
    """Up to so many products for each core; half where each lane reads a line of its own."""
    sizes = {"k": 4096, "format": format, "dtype": "f32", "chip": _C.CUDA, "gpu": {"cores": 12}}
    for n, arranged in ((3 * each, 1), (3 * each - 1, 0)):
        plan = _C.plan(m=4, n=n, strategy="gemv_batched", **sizes)
        assert plan["main"] == arranged, n

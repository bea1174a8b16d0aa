"""linear by torch's own matmul: where it is chosen, what is decoded for it, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import DTYPES, strategies_used

from torch_metalmm import _C, formats
from torch_metalmm.tools import explain
from torch_metalmm.tools.cost_model import predict

pytestmark = pytest.mark.quick

M5 = tuple(chip for chip in explain.chips() if chip.startswith("m5"))
# {chip: rows of x from which f16 and bf16 are torch's}
FROM = {**dict.fromkeys(M5, 96), _C.CUDA: 33}
FROM_BF16 = {**FROM, _C.CUDA: 25}  # gemm_small holds 8 rows of it
READABLE_FROM = {**FROM, _C.CUDA: 2}  # where W is of the dtype of x
LINEAR: dict[str, Any] = {"n": 4096, "k": 4096, "format": "q4_k"}


def dense(**problem: Any) -> dict[str, Any] | None:
    """What torch's matmul is given of a problem."""
    found: dict[str, Any] | None = _C.plan(**LINEAR | problem)["dense"]
    return found


@pytest.mark.parametrize("chip", [*explain.chips(), _C.CUDA])
def test_chosen_where_torch_reaches_more(chip: str) -> None:
    """From a number of rows on, of halves; on M1 to M4, and of f32, never."""
    for dtype in DTYPES:
        for format in ("q4_k", "f16", "affine4_g64"):
            taken = [m for m in range(1, 130) if dense(m=m, dtype=dtype, format=format, chip=chip)]
            packed = FROM_BF16 if dtype == "bf16" else FROM
            rows = READABLE_FROM if format == dtype else packed
            first = rows.get(chip) if dtype != "f32" else None
            assert taken == ([] if first is None else list(range(first, 130)))
    assert bool(dense(m=4096, chip=chip)) == (chip in FROM)
    assert all(
        dense(m=m, dtype=d, chip=chip, strategy="dense") for m in (1, 7, 600) for d in DTYPES
    )


@pytest.mark.parametrize("chip", M5)
def test_the_model_predicts_no_loss(chip: str) -> None:
    """From the threshold of M5 on, of packed formats and of W as x is: no slower than gemm."""
    for format in {*formats.names()} - {"bf16", "f32"}:
        for m in (FROM[chip], 128, 512):
            for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)):
                sizes = {"m": m, "n": n, "k": k, "format": format, "chip": chip}
                taken, kernel = (predict(**sizes, strategy=s) for s in ("dense", "gemm"))
                assert taken.total <= kernel.total, sizes


def test_the_reason_says_why_and_how() -> None:
    plan = _C.plan(m=512, **LINEAR | {"n": 14336}, chip="m5-max")
    assert plan["reason"] == (
        "dense: M = 512 is at least 96, and torch's matmul reaches the neural accelerators; W is "
        "decoded in panels of 14336 rows, 1 in all"
    )
    forced = _C.plan(m=3, **LINEAR | {"format": "f16"}, chip="m1", strategy="dense")
    assert forced["reason"] == "dense: forced; W is multiplied as it lies"


@pytest.mark.parametrize(
    ("n", "k", "dtype", "rows", "panels"),
    [
        (16384, 4096, "f16", 16384, 1),
        (16385, 4096, "f16", 8208, 2),
        (8193, 4096, "f32", 4112, 2),
        (128256, 4096, "bf16", 16032, 8),
        (33, 2**26, "f16", 16, 3),  # no fewer rows, whatever they take
        (5, 32, "f16", 5, 1),
        (5, 0, "f16", 5, 0),
    ],
)
def test_panels(n: int, k: int, dtype: str, rows: int, panels: int) -> None:
    """Of like size, at most 128 MB, a multiple of 16 rows where there are several."""
    plan = _C.plan(m=2, n=n, k=k, format="q4_0", dtype=dtype, chip=_C.CUDA, strategy="dense")
    assert (plan["dense"]["rows"], plan["dense"]["panels"]) == (rows, panels)
    assert strategies_used(plan) == ["dequantize"] * panels


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_dtype_of_x_are_not_decoded(dtype: str) -> None:
    for format in ("f32", "f16", "bf16", "q8_0"):
        found = dense(m=99, format=format, dtype=dtype, chip="m1", strategy="dense")
        assert found and found["panels"] == (format != dtype)
    one = dense(m=99, k=1, format="bf16", dtype="f16", chip="m1", strategy="dense")
    assert one and one["panels"] == 1


@pytest.mark.parametrize("chip", ["m5", _C.CUDA])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("problem", "passes"),
    [
        ({}, []),
        ({"bias": True}, ["split_reduce"]),
        ({"c": True, "beta": 1.0}, ["split_reduce"]),
        ({"c": True}, []),
        ({"alpha": 0.5}, ["split_reduce"]),
        ({"y_f32": True}, []),
    ],
)
def test_what_joins_the_products_is_a_pass(
    problem: dict[str, Any], passes: list[str], dtype: str, chip: str
) -> None:
    """Of the products where they lie, in y; CUDA's f32 sums of halves have a workspace."""
    plan = _C.plan(m=96, **LINEAR, dtype=dtype, chip=chip, strategy="dense", **problem)
    assert strategies_used(plan) == ["dequantize", *passes]
    is_apart = passes and chip == _C.CUDA and dtype != "f32"
    assert plan["workspace_bytes"] == (4 * 96 * 4096 if is_apart else 0)
    for one in plan["passes"][1:]:
        assert one["args"]["parts"] == bool(is_apart)


def test_rows_behind_a_norm_are_not_chosen_with_it() -> None:
    with pytest.raises(ValueError, match="norm: gemm does not normalise x"):
        _C.plan(m=128, norm=True, chip="m5", **LINEAR)


def test_split_k_is_of_kernels() -> None:
    for m in (1, 48, 512):
        plan = _C.plan(m=m, **LINEAR, chip=_C.CUDA, strategy="split_reduce")
        assert plan["dense"] is None and strategies_used(plan)[1] == "split_reduce"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"op": "swiglu_up"}, "strategy: dense computes linear, not swiglu_up; that takes swiglu_"),
        ({"op": "embedding"}, "strategy: dense computes linear, not embedding"),
        ({"op": "act_mul"}, "strategy: dense computes linear, not act_mul"),
        ({"norm": True}, "strategy: dense does not normalise x"),
        ({"k": 100}, "k: 100 is not a multiple of the 256 values of a block of q4_k"),
    ],
)
def test_refused(problem: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.plan(**LINEAR | problem, chip="m5", strategy="dense")


def test_without_threadgroup_memory_a_kernel_is_refused_as_ever() -> None:
    """Every kernel is bound 16 bytes, those that decode, too."""
    with pytest.raises(ValueError, match="gpu: dense needs 16 bytes of threadgroup memory"):
        _C.plan(m=96, **LINEAR, chip="m5", gpu={"max_threadgroup_memory": 0})


def test_an_nvidia_gpu_has_a_chip_s_row_and_is_none() -> None:
    gpu, row = _C.gpu("CUDA"), _C.gpu("m4-max")
    assert gpu == row | {"name": _C.CUDA} and _C.CUDA not in explain.chips()


def test_rows_of_x_are_those_of_few_graphs() -> None:
    """MPS compiles a graph for each M: on Macs multiples of 64, elsewhere as they are."""
    for m, rows in ((1, 64), (64, 64), (65, 128), (600, 640)):
        assert (dense(m=m, chip="m1", strategy="dense") or {})["x_rows"] == rows
        assert (dense(m=m, chip=_C.CUDA, strategy="dense") or {})["x_rows"] == m


def test_torch_gets_no_product_that_is_wrong_on_macs() -> None:
    """From K = 32767 on a kernel multiplies; asked for by name, torch's product is refused."""
    for chip, taken in (("m5-max", False), (_C.CUDA, True)):
        assert bool(dense(m=512, k=32768, chip=chip)) == taken
    assert dense(m=512, k=32766, chip="m5-max", format="bf16")
    assert not dense(m=512, k=32767, chip="m5-max", format="bf16")
    with pytest.raises(ValueError, match=r"strategy: dense multiplies K = 32768 .* up to 32766"):
        dense(m=512, k=32768, chip="m1", strategy="dense")

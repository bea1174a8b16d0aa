"""The ops beside linear, their fakes and schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from inputs import activations, generator, random_weight
from op_calls import named, op_calls
from oracle import DTYPES, FORMATS, Value, check, spec
from torch import Tensor

from torch_metalmm import formats

ops = torch.ops.metalmm


CALLS = op_calls(torch.float32)
FROZEN = (
    *("dequantize", "embedding", "quantize", "probe", "cache_append", "rope_append"),
    *("causal_conv", "gated_delta", "ssm_scan", "rope_tables", "attention of"),
)  # nothing requires a gradient

CHECKS: tuple[str, ...] = ("test_schema", "test_faketensor")
CHECKS += ("test_autograd_registration", "test_aot_dispatch_dynamic")


def given_tensors(label: str) -> int:
    return sum(isinstance(t, Tensor) for t in named(CALLS[label]).values())


# {op: the call of it with the fewest operands and the one with the most}
ENDS = {
    op: {pick((n for n, call in CALLS.items() if call[0] is op), key=given_tensors)
         for pick in (min, max)}
    for op, _, _ in CALLS.values()
}  # fmt: skip


def moved(given: Any, backend: Backend, grad: bool) -> Any:
    """An argument on the engine's device; with `grad`, one that requires it where it can: weights
    are dense in the shapes below, of experts too."""
    view = backend.put_view(given)
    is_weight = isinstance(given, Tensor) and given.shape in ((5, 64), (3, 6, 64))
    if not grad or is_weight or not isinstance(given, Tensor) or not given.is_floating_point():
        return view
    return view.detach().requires_grad_()


def test_every_op_is_called() -> None:
    """The table above names every op of the library; beside each is what computes its shape."""
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("metalmm::")}
    called = {op._qualified_op_name for op, _, _ in CALLS.values()}
    shapes = {name.replace("::", "::_") + "_shape" for name in called}
    assert schemas == called | shapes | {"metalmm::_take_failure", "metalmm::_exact_rows"}


@pytest.mark.parametrize(
    ("label", "grad"),
    [
        (label, grad)
        for label in CALLS
        for grad in (False, True)[: 1 if label.startswith(FROZEN) else 2]
    ],
)
def test_opcheck(label: str, grad: bool, backend: Backend) -> None:
    """Schema (no argument is changed that it does not name, none is in the result), autograd
    registration, shape, dtype and strides of fakes; of two calls of each op AOT dispatch with
    dynamic shapes, which records a gradient where there is one. A slow engine takes what depends
    on the engine: the schema and the fakes."""
    is_recorded = grad or label.startswith(FROZEN)
    is_traced = is_recorded and label in ENDS[CALLS[label][0]] and not backend.is_slow
    checks = CHECKS if is_traced else CHECKS[:2]
    dtypes = [torch.float32] if grad else [torch.bfloat16]
    if label.startswith(FROZEN) and not is_traced:  # which have no case with a gradient
        dtypes.append(torch.float32)
    for dtype in dtypes:
        op, args, kwargs = op_calls(dtype)[label]
        options = {k: backend.put_view(a) for k, a in kwargs.items()}
        given = tuple(moved(a, backend, grad) for a in args)
        torch.library.opcheck(op.default, given, options, test_utils=checks)


WRITTEN = {
    op: [a.name for a in op.default._schema.arguments if a.alias_info and a.alias_info.is_write]
    for op, _, _ in CALLS.values()
}


@pytest.mark.parametrize("label", [label for label, call in CALLS.items() if WRITTEN[call[0]]])
def test_autograd_is_told_of_a_write(label: str, backend: Backend) -> None:
    """By the version of the tensor."""
    op = CALLS[label][0]
    put = {n: backend.put_view(a) for n, a in named(CALLS[label]).items()}
    before = {n: put[n]._version for n in WRITTEN[op]}
    op(**put)
    assert before and all(put[n]._version > before[n] for n in before)


# ---- the values of the ops beside linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_gemm_and_gemv(
    name: str, dtype: torch.dtype, backend: Backend, strategy: str | None
) -> None:
    """alpha x Wᵀ + beta c; of a slow engine, one of both with each format and M."""
    k = backend.k(name)
    packed = random_weight(name, 21, k)
    values, w = spec(name, packed, k), backend.put(packed)
    scales = ((1, 0), (-1.5, 0), (0.75, 1), (1, -2), (0, 0.5), (0, 0), (2.0**-10, 1))
    for i, m in enumerate((0, 1, 5, 33)):
        halved = backend.halves(strategy, dtype, name, (m, 21, k))
        x, c = activations(m, k, dtype=dtype), activations(m, 21, dtype=dtype, seed="c")
        few = scales[(FORMATS.index(name) + i) % len(scales) :: len(scales)]
        for alpha, beta in few if backend.is_slow else scales:
            product = Value.of(x).dot(values, halved=halved) * alpha
            want = (product + Value.of(c) * beta).store(dtype)
            args = (name, backend.put(c), alpha, beta, strategy)
            y = ops.gemm(backend.put(x), w, *args)
            assert y.dtype == dtype
            check(y, want, f"{name} M={m} {alpha} {beta}")
            y = ops.gemm(backend.put(x), w, *args, softcap=2.5)
            want = (product + Value.of(c) * beta).soft_cap(2.5)
            check(y, want.store(dtype), f"{name} M={m} {alpha} {beta} capped")
            if m == 1:
                y = ops.gemm(backend.put(x), w, *args)
                row = ops.gemv(backend.put(x[0]), w, name, backend.put(c[0]), *args[2:])
                assert torch.equal(row, y[0])


@pytest.mark.parametrize("c_dtype", DTYPES, ids=str)
def test_c_has_any_dtype_and_layout(c_dtype: torch.dtype, backend: Backend) -> None:
    """c is added in f32: its dtype is its own, and so are its strides."""
    packed, x = random_weight("q8_0", 6, 64), activations(4, 64, dtype=torch.float16)
    c = activations(6, 4, dtype=c_dtype, seed="c").T
    y = ops.gemm(backend.put(x), backend.put(packed), "q8_0", backend.put_view(c), 1.0, 2.0)
    halved = backend.halves(None, torch.float16, "q8_0", (4, 6, 64))
    want = Value.of(x).dot(spec("q8_0", packed, 64), halved=halved) + Value.of(c) * 2
    check(y, want.store(torch.float16), str(c_dtype))


def test_beta_zero_does_not_read_c(backend: Backend) -> None:
    """As in BLAS: with beta = 0, NaN in c does not matter; c may be left out."""
    w, x = backend.put(random_weight("q4_0", 6, 64)), backend.put(activations(4, 64))
    c = backend.put(torch.full((4, 6), torch.nan))
    want = ops.gemm(x, w, "q4_0")
    assert want.isfinite().all()
    assert torch.equal(ops.gemm(x, w, "q4_0", c, 1.0, 0.0), want)
    assert torch.equal(ops.gemm(x, w, "q4_0", c), want)
    assert torch.equal(ops.gemv(x[0], w, "q4_0", c[0]), ops.gemv(x[0], w, "q4_0"))
    assert ops.gemm(x, w, "q4_0", c, 1.0, 1.0).isnan().all()


def test_gemm_is_linear(backend: Backend) -> None:
    """With alpha 1 and no c, gemm and gemv are linear, bit for bit; x may be strided."""
    w = backend.put(random_weight("q6_k", 6, 512))
    x = backend.put_view(activations(512, 40).T)
    assert torch.equal(ops.gemm(x, w, "q6_k"), ops.linear(x, w, None, "q6_k"))
    assert torch.equal(ops.gemv(x[3], w, "q6_k"), ops.linear(x[3], w, None, "q6_k"))


def test_swiglu_rounds_once(backend: Backend) -> None:
    """gate beyond 65504 stays finite for f16 x, in few rows and in many, when up is small."""
    gate, up = torch.full((3, 64), 64.0).half(), torch.full((3, 64), 2.0**-15).half()
    for m in (1, 5, 40):
        x = torch.full((m, 64), 32.0).half()  # gate 131072, up 2^-4
        y = ops.swiglu(backend.put(x), backend.put(gate), backend.put(up), "f16", "f16")
        assert torch.equal(y.cpu(), torch.full((m, 3), 8192.0).half()), m


def test_swiglu_does_not_overflow_in_between(backend: Backend) -> None:
    """silu(gate) * up beyond 65504 stays finite for f16 inputs when the product with W is small."""
    gate = torch.full((2, 64), 3e4, dtype=torch.float16)
    w = backend.put(torch.full((3, 64), 2.0**-24).half())
    y = ops.swiglu_linear(backend.put(gate), backend.put(gate), w, None, "f16").cpu()
    want = (Value.of(gate).silu() * Value.of(gate)).dot(w.cpu()).store(torch.float16)
    check(y, want, "large hidden")


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_embedding_takes_any_ids(ids_dtype: torch.dtype, backend: Backend) -> None:
    """Every shape of ids, strided ones too, in any order and repeated."""
    packed = random_weight("q5_k", 40, 512)
    w, rows = backend.put(packed), spec("q5_k", packed, 512)
    ids = torch.randint(0, 40, (4, 3, 6), generator=generator("ids")).to(ids_dtype)
    for view in (
        ids,
        ids[0, 0],
        ids[0, 0, 0],
        ids.transpose(0, 2),
        ids[..., ::2],
        ids[:0],
        ids[:, :0],
    ):
        got = ops.embedding(backend.put_view(view), w, "q5_k").cpu()
        assert torch.equal(got, rows[view.long()])
    every = torch.arange(40, dtype=ids_dtype).expand(3, 40)
    assert torch.equal(
        ops.embedding(backend.put_view(every), w, "q5_k").cpu(), rows.expand(3, 40, 512)
    )


@pytest.mark.every_format
def test_in_features_may_be_left_out(name: str, backend: Backend) -> None:
    """K follows from row_bytes where one K has them; where two have, it must be given."""
    f = formats.get(name)
    for blocks in range(0, 9):
        k = blocks * f.block_values
        w = backend.put(random_weight(name, 2, k))
        sizes = [f.row_bytes(b * f.block_values) for b in range(0, 11)]
        if sizes.count(f.row_bytes(k)) > 1:
            with pytest.raises(ValueError, match=r"in_features.*say which"):
                ops.dequantize(w, name)
        else:
            assert torch.equal(ops.dequantize(w, name), ops.dequantize(w, name, k))
            assert ops.embedding(backend.put(torch.tensor([1])), w, name).shape == (1, k)
        assert ops.dequantize(w, name, k).shape == (2, k)
        assert ops.dequantize(w[:0], name, k).shape == (0, k)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_dense_weights_need_no_bytes_view(name: str, backend: Backend) -> None:
    """A [N, K] tensor of the format's dtype is taken as it is, strided too."""
    dtype = getattr(torch, {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[name])
    dense = backend.put(activations(6, 40, seed="dense").to(dtype))
    packed, x = dense.view(torch.uint8), backend.put(activations(3, 40))
    ids = backend.put(torch.tensor([5, 0]))
    for w in (dense, dense.T.contiguous().T, torch.cat([dense, dense], 1)[:, :40]):
        assert torch.equal(ops.linear(x, w, None, name), ops.linear(x, packed, None, name))
        assert torch.equal(ops.dequantize(w, name, dtype=dtype), dense)
        assert torch.equal(ops.embedding(ids, w, name, dtype=dtype), dense[[5, 0]])

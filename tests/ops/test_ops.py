"""The ops beside linear, their fakes and schemas, and what threads may not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from inputs import activations, generator, random_weight
from op_calls import op_calls
from oracle import DTYPES, FORMATS, Value, check, spec
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_metalmm import formats

ops = torch.ops.metalmm


CALLS = tuple(op_calls(torch.float32))
FROZEN = (
    "dequantize",
    "embedding",
    "quantize",
    "probe",
    "cache_append",
    "rope_append",
    "causal_conv",
    "gated_delta",
    "ssm_scan",
    "rope_tables",
    "attention of",
)  # nothing requires a gradient

WRITERS = ("cache_append", "rope_append", "causal_conv", "gated_delta", "ssm_scan")


def moved(args: tuple[Any, ...], backend: Backend, grad: bool = False) -> tuple[Any, ...]:
    """args on the engine's device; with `grad`, floating tensors but dense weights require one."""
    out = []
    for i, a in enumerate(args):
        if not isinstance(a, Tensor):
            out.append(a)
            continue
        view = backend.put_view(a)
        weight = a.shape in ((5, 64), (3, 6, 64)) and i > 0  # dense, of experts too
        out.append(
            view.detach().requires_grad_()
            if grad and a.is_floating_point() and not weight
            else view
        )
    return tuple(out)


def moved_options(kwargs: dict[str, Any], backend: Backend) -> dict[str, Any]:
    return dict(zip(kwargs, moved(tuple(kwargs.values()), backend), strict=True))


def results(y: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    return () if y is None else y if isinstance(y, tuple) else (y,)


def test_every_op_is_called() -> None:
    """The table above names every op of the library; beside each is what computes its shape."""
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("metalmm::")}
    called = {op._qualified_op_name for op, _, _ in op_calls(torch.float32).values()}
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
    """Schema, autograd registration, fake tensors and AOT dispatch with dynamic shapes."""
    dtype = (torch.float32, torch.bfloat16)[(CALLS.index(label) + grad) % 2]
    op, args, kwargs = op_calls(dtype)[label]
    torch.library.opcheck(op.default, moved(args, backend, grad), moved_options(kwargs, backend))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label", CALLS)
def test_fakes_have_the_shape_dtype_and_strides(
    label: str, dtype: torch.dtype, backend: Backend
) -> None:
    op, args, kwargs = op_calls(dtype)[label]
    args, kwargs = moved(args, backend), moved_options(kwargs, backend)
    real = op(*args, **kwargs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        options = {
            k: mode.from_tensor(a) if isinstance(a, Tensor) else a for k, a in kwargs.items()
        }
        fake = op(*fakes, **options)
    for got, want in zip(results(real), results(fake), strict=True):
        for attribute in ("shape", "dtype", "device", "stride", "storage_offset"):
            a, b = getattr(got, attribute), getattr(want, attribute)
            assert (a() if callable(a) else a) == (b() if callable(b) else b), attribute
        assert got.is_contiguous()


@pytest.mark.parametrize("label", [c for c in CALLS if not c.startswith(WRITERS)])
def test_ops_leave_their_arguments_alone(label: str, backend: Backend) -> None:
    """No input changes, and the result shares no memory with one."""
    op, args, kwargs = op_calls(torch.float32)[label]
    args, kwargs = moved(args, backend), moved_options(kwargs, backend)
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    for y in results(op(*args, **kwargs)):
        y.fill_(7)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


# ---- the values of the ops beside linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_gemm_and_gemv(
    name: str, dtype: torch.dtype, backend: Backend, strategy: str | None
) -> None:
    """alpha x Wᵀ + beta c; of a slow engine, some of both with each format and M."""
    k = backend.k(name)
    packed = random_weight(name, 21, k)
    values, w = spec(name, packed, k), backend.put(packed)
    scales = ((1, 0), (-1.5, 0), (0.75, 1), (1, -2), (0, 0.5), (0, 0), (2.0**-10, 1))
    for i, m in enumerate((0, 1, 5, 33)):
        halved = backend.halves(strategy, dtype, name, (m, 21, k))
        x, c = activations(m, k, dtype=dtype), activations(m, 21, dtype=dtype, seed="c")
        few = scales[(FORMATS.index(name) + i) % 3 :: 3]
        for alpha, beta in few if backend.is_slow else scales:
            product = Value.of(x).dot(values, halved=halved) * alpha
            want = (product + Value.of(c) * beta).store(dtype)
            args = (name, backend.put(c), alpha, beta, strategy)
            y = ops.gemm(backend.put(x), w, *args)
            assert y.dtype == dtype
            check(y, want, f"{name} M={m} {alpha} {beta}")
            if m == 1:
                row = ops.gemv(backend.put(x[0]), w, name, backend.put(c[0]), *args[2:])
                assert torch.equal(row, y[0])


@pytest.mark.parametrize("c_dtype", DTYPES, ids=str)
def test_c_has_any_dtype_and_layout(c_dtype: torch.dtype, backend: Backend) -> None:
    """c is added in f32: its dtype is its own, and so are its strides."""
    packed, x = random_weight("q8_0", 6, 64), activations(4, 64, dtype=torch.float16)
    c = activations(6, 4, dtype=c_dtype, seed="c").T
    y = ops.gemm(backend.put(x), backend.put(packed), "q8_0", backend.put_view(c), 1.0, 2.0)
    want = Value.of(x).dot(spec("q8_0", packed, 64)) + Value.of(c) * 2
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


def test_names_are_accepted_in_any_case(backend: Backend) -> None:
    w, x = backend.put(random_weight("affine4_g64_bf16", 3, 128)), backend.put(activations(2, 128))
    for name in ("Affine4_G64_BF16", "AFFINE4_G64_BF16"):
        assert torch.equal(ops.linear(x, w, None, name), ops.linear(x, w, None, name.lower()))
        with FakeTensorMode() as mode:
            assert ops.linear(mode.from_tensor(x), mode.from_tensor(w), None, name).shape == (2, 3)


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

"""Where x and the weight lie in memory changes no bit, and nothing beside them is touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import guarded
import oracle
import pytest
import torch
from backends import ONE_OF_EACH, Backend
from forked import forked
from inputs import activations, random_weight
from op_calls import op_calls
from oracle import DTYPES, FORMATS, check, spec
from places import COMPILER
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_metalmm import formats

ops = torch.ops.metalmm


def x_layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views whose values are x [6, K], possibly with other leading dims, in NaN memory."""
    m, k = x.shape

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=x.dtype)

    def into(view: Tensor, values: Tensor = x) -> Tensor:
        view.copy_(values.view(view.shape))
        return view

    yield "3-D", into(nan(2, 3, k))
    yield "4-D with ones", into(nan(1, 2, 1, 3, k)[0])
    yield "transposed leading dims", into(nan(3, 2, k).transpose(0, 1))
    yield "padded batch stride", into(nan(2, 5, k)[:, 1:4])
    yield "in the middle of NaN", into(nan(m + 2, k + 7)[1:-1, 3:-4])
    yield "odd storage offset", into(nan(m * k + 1)[1:].view(m, k))
    yield "at the end of its storage", into(nan(m + 1, k)[1:])
    yield "last dim strided", into(nan(m, 2 * k)[:, 1::2])
    yield "columns first", into(nan(k, m).T)
    yield "every second row", into(nan(2 * m, k)[::2])
    yield "one row expanded", into(nan(1, k), x[:1]).expand(m, k)
    yield "batch expanded", into(nan(3, k), x[:3]).expand(2, 3, k)
    yield "1-D", into(nan(k), x[0])
    yield "1-D strided", into(nan(k, 3)[:, 1], x[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_layouts_of_x(
    name: str, dtype: torch.dtype, backend: Backend, strategy: str | None
) -> None:
    """The layout of x changes no bit of y but of torch's matmul; NaN beside x is not read.

    A slow engine takes every second layout, the others with the next format and dtype.
    """
    k = backend.k(name)
    packed, x = random_weight(name, 9, k), activations(6, k, dtype=dtype)
    w = backend.put(packed)
    rows = ops.linear(backend.put(x), w, None, name, strategy).cpu()
    halved = backend.halves(strategy, dtype, name, (6, 9, k))
    values = spec(name, packed, k)
    check(rows, oracle.linear(x, values, halved=halved), name)
    turn = FORMATS.index(name) + DTYPES.index(dtype)
    views = list(x_layouts(x))
    for label, view in views[turn % 2 :: 2] if backend.is_slow else views:
        view = backend.put_view(view)
        y = ops.linear(view, w, None, name, strategy).cpu()
        assert y.shape == (*view.shape[:-1], 9) and y.is_contiguous(), label
        if strategy == "dense":
            given = view.reshape(-1, k).cpu()
            check(y.view(-1, 9), oracle.linear(given, values, halved=halved), label)
            continue
        of_m = ops.linear(view.reshape(-1, k).contiguous(), w, None, name, strategy).cpu()
        assert torch.equal(y.view(-1, 9), of_m), label
        if view.numel() == x.numel() and "expanded" not in label:
            assert torch.equal(y.view(6, 9), rows), label


def w_layouts(packed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views whose bytes are packed [7, row_bytes], in memory of 0xFF: NaN as a scale."""
    n, size = packed.shape

    def ones(*shape: int) -> Tensor:
        return torch.full(shape, 255, dtype=torch.uint8)

    def into(view: Tensor) -> Tensor:
        view.copy_(packed)
        return view

    for offset in (1, 2, 3, 5, 8, 15):
        yield f"byte offset {offset}", into(ones(offset + n * size + 64)[offset:-64].view(n, size))
    yield "at the end of its storage", into(ones(33 + n * size)[33:].view(n, size))
    yield "rows of a taller one", into(ones(n + 7, size)[3:-4])
    yield "first columns of a wider one", into(ones(n, size + 19)[:, :size])
    yield "middle columns of a wider one", into(ones(n, size + 19)[:, 7 : 7 + size])
    yield "every second row", into(ones(2 * n, size)[1::2])
    yield "columns first", into(ones(size, n).T)
    yield "every second byte", into(ones(n, 2 * size)[:, ::2])


@pytest.mark.isa
@pytest.mark.formats
def test_layouts_of_the_weight(name: str, backend: Backend, strategy: str | None) -> None:
    """Alignment, row stride and neighbours of the packed bytes change no bit of any result.

    A slow engine takes every second layout, the others with the next format.
    """
    k = formats.get(name).block_values * 3 + (10 if formats.get(name).block_values == 1 else 0)
    packed = random_weight(name, 7, k)
    x = backend.put(activations(3, k, dtype=backend.dtype(name, strategy)))
    g = backend.put(activations(2, 7))
    ids = backend.put(torch.tensor([6, 0, 3]))

    def results(w: Tensor) -> list[Tensor]:
        y = ops.linear(x, w, None, name, strategy)
        if strategy:
            return [y]
        decoded = ops.dequantize(w, name, k), ops.embedding(ids, w, name, k)
        return [y, *decoded, ops.linear_input_grad(g, w, name, k)]

    expected = results(backend.put(packed))
    views = list(w_layouts(packed))
    for label, view in views[FORMATS.index(name) % 2 :: 2] if backend.is_slow else views:
        for i, (a, b) in enumerate(zip(results(backend.put_view(view)), expected, strict=True)):
            assert torch.equal(a, b), (label, i)


@pytest.mark.formats
def test_rows_of_the_weight_are_independent(
    name: str, backend: Backend, strategy: str | None
) -> None:
    """w[3:7], w[::3] and w[2:3] expanded give those columns of y; 0xFF in a row spoils one."""
    k = backend.k(name)
    packed, dtype = random_weight(name, 10, k), backend.dtype(name, strategy)
    given, values = activations(5, k, dtype=dtype), spec(name, packed, k)
    w, x = backend.put(packed.clone()), backend.put(given)
    for label, rows, columns in (
        ("w[3:7]", w[3:7], slice(3, 7)),
        ("w[::3]", w[::3], slice(None, None, 3)),
        ("w[2:3] expanded", w[2:3].expand(5, -1), [2] * 5),
    ):
        halved = backend.halves(strategy, dtype, name, (5, len(rows), k))
        expected = oracle.linear(given, values[columns], halved=halved)
        check(ops.linear(x, rows, None, name, strategy), expected, label)
    clean = ops.linear(x, w, None, name, strategy)
    w[4] = 255
    others = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert torch.equal(ops.linear(x, w, None, name, strategy)[:, others], clean[:, others])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.formats
def test_rows_of_x_are_independent(
    name: str, bad: float, backend: Backend, strategy: str | None
) -> None:
    """A NaN or Inf in one row of x makes that row of y non-finite and leaves the others alone."""
    k = backend.k(name)
    w = backend.put(random_weight(name, 14, k))
    places = ((2, 0), (3, 1), (8, 7), (9, 8), (40, 17))
    dtype = backend.dtype(name, strategy)
    for m, row in places[FORMATS.index(name) % 2 :: 2] if backend.is_slow else places:
        x = activations(m, k, dtype=dtype)
        clean = ops.linear(backend.put(x), w, None, name, strategy).cpu()
        x[row, k // 2] = bad
        y = ops.linear(backend.put(x), w, None, name, strategy).cpu()
        others = [i for i in range(m) if i != row]
        assert torch.equal(y[others], clean[others]), (m, row)
        assert not y[row].isfinite().any(), (m, row)


def guarded_heap(folder: Path) -> dict[str, str]:
    """The environment of a process whose blocks of memory can end at pages that trap."""
    if sys.platform != "linux":
        return {}
    source, library = Path(guarded.__file__).with_name("guarded_heap.cpp"), folder / "heap.so"
    command = [*COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.isa
def test_no_access_beyond_a_buffer(backend: Backend, tmp_path: Path) -> None:
    """Every codec, strategy and op: inputs, scratch and results lie against pages that trap."""
    if backend.name != "cpu":
        pytest.skip("pages that trap are memory of the CPU")
    path, said = os.pathsep.join(str(Path(p).resolve()) for p in sys.path), tmp_path / "said"
    heap = guarded_heap(tmp_path)
    with forked("from guarded import run\n", {"PYTHONPATH": path} | heap) as calls:
        traps = [calls(said, name) for name in guarded.TRAPS]
        status = calls(said, *ONE_OF_EACH, *op_calls(torch.float32))
    ends = [-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT]
    assert all(status in ends for status in traps[: len(traps) if heap else 1])
    assert status == 0, said.read_text()


# ---- the layout of results


def anyhow(t: Tensor, r: random.Random) -> Tensor:
    """t in other memory: its dimensions in any order, with any stride where they have one index."""
    order = r.sample(range(t.dim()), t.dim())
    back = sorted(range(t.dim()), key=order.__getitem__)
    moved = t.permute(order).contiguous().permute(back)
    strides = [
        s if n > 1 else r.choice((1, 7)) for n, s in zip(t.shape, moved.stride(), strict=True)
    ]
    return moved.as_strided(t.shape, strides)


def calls_with_ones(r: random.Random, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """(op, its arguments): small sizes, most of them 1, and tensors that lie anyhow."""

    def x(*shape: int) -> Tensor:
        return anyhow(activations(*shape, seed=r.random()).to(dtype), r)

    b, s, m, n, k, heads, dim = (r.choice((1, 1, 2, 3)) for _ in range(7))
    w = activations(n, k).view(torch.uint8)
    rows, addend = x(b, s, m, k), x(b, s, m, n)
    yield ops.linear, rows, w, None, "f32", None, addend
    yield ops.linear_input_grad, addend, w, "f32", k
    yield ops.norm_linear, rows, x(k), 1e-5, 0.0, w, None, "f32", addend
    yield ops.rms_norm, rows, x(k), 1e-5, 0.0, x(b, s, m, k)
    yield ops.rms_norm, rows, None, 1e-5
    yield ops.add_rms_norm, rows, x(b, s, m, k), x(k), 1e-5
    yield ops.add_rms_norm, rows, x(b, s, m, k).float(), None, 1e-5
    yield ops.swiglu, rows, w, w, "f32", "f32"
    yield ops.swiglu_linear, rows, x(b, s, m, k), w, None, "f32", "silu", addend
    yield ops.gemm, x(m, k), w, "f32", x(m, n), 1.0, 1.0
    yield ops.gemv, x(k), w, "f32", x(n), 1.0, 1.0
    yield ops.dequantize, anyhow(w, r), "f32"
    yield ops.embedding, anyhow(torch.zeros(b, s, dtype=torch.int64), r), w, "f32"
    angle = r.choice((1, b)), s, dim // 2 * 2
    qkv, angles = x(b, s, 3 * heads * dim), (x(*angle), x(*angle))
    yield ops.rope, qkv, *angles, heads, heads
    yield ops.rope, qkv, *angles, 2 * heads, heads, x(b, s, heads * dim), x(dim).float()
    q, cache = x(b, heads * m, s, dim), [x(b, heads, n, dim).float() for _ in range(2)]
    yield ops.attention, q, *cache, "f32", "f32", torch.tensor(r.randint(0, n))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_have_the_strides_of_their_fakes(
    dtype: torch.dtype, grad: bool, backend: Backend
) -> None:
    """Those of a new tensor, also of dimensions of size 1: compiled code relies on each."""

    def moved(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        view = backend.put_view(t).detach()
        return view.requires_grad_() if grad and view.is_floating_point() else view

    r = random.Random(str(dtype))
    for _ in range(4 if backend.is_slow else 10):
        for op, *args in calls_with_ones(r, dtype):
            args = [moved(a) for a in args]
            with FakeTensorMode() as mode:
                fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
            real = op(*args)
            given = [(a.shape, a.stride()) for a in args if isinstance(a, Tensor)]
            of_each = (t if isinstance(t, tuple) else (t,) for t in (real, fake))
            for y, want in zip(*of_each, strict=True):
                assert y.shape == want.shape and y.dtype == want.dtype, (op, given)
                assert y.stride() == want.stride(), (op, y.shape, y.stride(), given)
                assert y.stride() == torch.empty(y.shape).stride(), (op, y.shape, y.stride())

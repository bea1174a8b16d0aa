"""The ops between the matrix products and what joins those: norms, residuals, activations, rope."""

from __future__ import annotations

import math

import pytest
import torch
from backends import Backend
from inputs import activations, random_weight
from layer_oracle import activated, normalized, normed_heads, rotated
from oracle import DTYPES, KINDS, Value, check, spec
from plan_cases import strategies_used
from torch import Tensor

from torch_metalmm import _C, formats

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules

EPS = 1e-5


def sized_rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of sizes from 2^-8 to 2^8, and one of zeros."""
    sizes = 2.0 ** torch.linspace(-8, 8, m)
    sizes[m // 2] = 0 if m > 2 else 1
    return (activations(m, k) * sizes[:, None]).to(dtype)


def normal_operand(
    x: Tensor, g: Tensor | None, offset: float, backend: Backend, fused: bool
) -> Value:
    """What the matrix product of norm_linear reads: rounded to x's dtype where it is a pass."""
    n = normalized(x, g, EPS, offset)
    return n if fused or not backend.chip() else n.store(x.dtype)


# ---- rms_norm


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7, 64, 1000, 4104])
def test_rms_norm(k: int, dtype: torch.dtype, backend: Backend) -> None:
    x = sized_rows(5, k, dtype)
    residual = activations(5, k, dtype=dtype, seed="residual")
    gate = (activations(5, k + 1, seed="gate") * 8).to(dtype)[:, 1:]
    others = (None, *DTYPES)
    turn = (k + DTYPES.index(dtype)) % 2
    for g_dtype in others[turn::2] if backend.is_slow else others:
        g = None if g_dtype is None else activations(k, dtype=g_dtype, seed="g")
        for offset in (0.0, 1.0) if g is not None else (0.0,):
            want = normalized(x, g, EPS, offset)
            put = (backend.put(g), EPS, offset)
            y = ops.rms_norm(backend.put(x), *put)
            assert y.dtype == dtype
            check(y, want.store(dtype), f"K={k} {g_dtype} {offset}")
            y = ops.rms_norm(backend.put(x), *put, backend.put(residual))
            check(y, (want + Value.of(residual)).store(dtype), f"K={k} {g_dtype} residual")
            y = ops.rms_norm(backend.put(x), *put, gate=backend.put_view(gate))
            want = want * Value.of(gate).silu()
            check(y, want.store(dtype), f"K={k} {g_dtype} gate")
            y = ops.rms_norm(backend.put(x), *put, backend.put(residual), backend.put(gate.float()))
            check(y, (want + Value.of(residual)).store(dtype), f"K={k} {g_dtype} both")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [7, 64, 520])
def test_rms_norm_of_groups(k: int, dtype: torch.dtype, backend: Backend) -> None:
    """A weight for each of the last two dimensions, of x whose rows lie apart."""
    x = sized_rows(6, k + 8, dtype)[:, :k].unflatten(0, (2, 3))
    gate = activations(2, 3, k, dtype=dtype, seed="gate")
    for g_dtype in DTYPES:
        g = activations(3, k, dtype=g_dtype, seed="rows")
        want = normalized(x, g, EPS, 1.0) * Value.of(gate).silu()
        y = ops.rms_norm(backend.put_view(x), backend.put(g), EPS, 1.0, gate=backend.put(gate))
        check(y, want.store(dtype), f"K={k} {g_dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype, backend: Backend) -> None:
    """The sum is rounded once, and what is normalised is the rounded sum."""
    x, residual = sized_rows(5, 264, dtype), activations(5, 264, dtype=dtype, seed="residual")
    g = activations(264, dtype=dtype, seed="g")
    y, s = ops.add_rms_norm(backend.put(x), backend.put(residual), backend.put(g), EPS, 1.0)
    assert torch.equal(s.cpu(), (x.float() + residual.float()).to(dtype))
    check(y, normalized(s.cpu(), g, EPS, 1.0).store(dtype), "norm of the sum")


def test_norms_of_strided_rows(backend: Backend) -> None:
    x = activations(40, 3, 2, 9)
    g = activations(9, seed="g")
    for view in (x.transpose(0, 2), x[..., ::2], x[:0], x[1, 1, 1]):
        weight = g[: view.shape[-1]]
        y = ops.rms_norm(backend.put_view(view), backend.put(weight), EPS)
        assert y.shape == view.shape and y.is_contiguous()
        check(y, normalized(view, weight, EPS).store(torch.float32), str(view.stride()))


def test_an_outlier_beside_small_values(backend: Backend) -> None:
    """f16's largest number squared is no f16; what is beside the outlier keeps its digits."""
    x = activations(2, 640, dtype=torch.float16) / 64
    x[:, 5] = 65504.0
    y = ops.rms_norm(backend.put(x), None, EPS)
    check(y, normalized(x, None, EPS).store(torch.float16), "f16")


# ---- norm_linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_norm_linear(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """norm(x) Wᵀ + bias + residual, rounded once."""
    k, n = backend.k(name), 13
    packed = random_weight(name, n, k)
    values, w = spec(name, packed, k), backend.put(packed)
    g = activations(k, dtype=dtype, seed="g")
    for m, weight, offset in ((1, g, 0.0), (1, None, 0.0), (3, g, 1.0), (16, g, 0.0), (27, g, 1.0)):
        x = sized_rows(m, k, dtype)
        residual = activations(m, n, dtype=dtype, seed="residual")
        bias = activations(n, dtype=dtype, seed="bias")
        operand = normal_operand(x, weight, offset, backend, m == 1)
        halved = backend.halves(None, dtype, name, (m, n, k))
        product = operand.dot(values, k + 8, halved=halved)
        args = (backend.put(x), backend.put(weight), EPS, offset, w)
        check(ops.norm_linear(*args, None, name), product.store(dtype), f"{name} M={m}")
        y = ops.norm_linear(*args, backend.put(bias), name, backend.put(residual))
        assert y.dtype == dtype
        want = product + Value.of(bias) + Value.of(residual)
        check(y, want.store(dtype), f"{name} M={m} with addends")
        y = ops.norm_linear(*args, None, name, backend.put(residual), factors=backend.put(bias))
        want = product * Value.of(bias) + Value.of(residual)
        check(y, want.store(dtype), f"{name} M={m} with factors")


@pytest.mark.formats
def test_norm_linear_of_a_one_hot_row(name: str, backend: Backend) -> None:
    """x = e_i, eps 0: the norm is sqrt(K), a power of two, so the result is sqrt(K) W[:, i]."""
    k = 4**5
    packed = random_weight(name, 9, k)
    w, values = backend.put(packed), spec(name, packed, k)
    dtype = backend.dtype(name, None)
    g = 2.0 ** (torch.arange(k) % 5 - 2).to(dtype)
    for i in (0, 17, k // 2 + 1, k - 1):
        x = torch.zeros(1, k, dtype=dtype)
        x[0, i] = -1.0
        y = ops.norm_linear(backend.put(x), backend.put(g), 0.0, 0.0, w, None, name).cpu()
        assert torch.equal(y[0], (-(2.0**5) * g[i] * values[:, i]).to(dtype)), i


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.formats
def test_norm_linear_rows_do_not_depend_on_each_other(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """A row of a batch has the bits of the row alone, wherever a vector kernel normalises both."""
    k, n = backend.k(name), 13
    w, g = backend.put(random_weight(name, n, k)), backend.put(activations(k, seed="g"))
    x = backend.put(sized_rows(4, k, dtype))
    alone = torch.cat([ops.norm_linear(row[None], g, EPS, 0.0, w, None, name) for row in x])
    for m in (2, 3, 4):
        if chip := backend.chip():
            sizes = {"n": n, "k": k, "format": name, "dtype": "f32", "chip": chip}
            one_row = strategies_used(_C.plan(m=1, **sizes, norm=True))
            # Simdgroups that share a row add their sums up in another order.
            fused = _C.norm_is_fused(m=m, format=name, chip=chip, dtype="f32")
            if "gemv_large_k" in one_row or not fused:
                continue
        y = ops.norm_linear(x[:m], g, EPS, 0.0, w, None, name)
        assert torch.equal(y, alone[:m]), m


# ---- residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_linear_adds_bias_and_residual(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """In f32, before the one rounding, in any dtype and with any strides."""
    k = formats.get(name).block_values * 2
    packed = random_weight(name, 9, k)
    values, w = spec(name, packed, k), backend.put(packed)
    for m, other in ((1, dtype), *((4, t) for t in DTYPES), (19, dtype)):
        x = activations(m, k, dtype=dtype)
        residual = 100 * activations(9, m, dtype=other, seed="residual").T
        bias = 100 * activations(9, dtype=other, seed="bias")
        # An addend of another dtype than x makes the kernels compute in f32.
        halved = other == dtype and backend.halves(None, dtype, name, (m, 9, k))
        for b in (None, bias):
            y = ops.linear(
                backend.put(x),
                w,
                backend.put(b),
                name,
                residual=backend.put_view(residual),
            )
            product = Value.of(x).dot(values, halved=halved)
            want = product if b is None else product + Value.of(b)
            check(y, (want + Value.of(residual)).store(dtype), f"{name} M={m} {other}")


def test_the_sum_with_the_residual_is_rounded_once(backend: Backend) -> None:
    """2048 + 1 is no f16: added to a rounded product it would stay 2048 where both are near."""
    w = backend.put(torch.full((1, 32), 1 / 32).half())
    for m in (1, 4, 40):
        x = torch.full((m, 32), 0.75).half()  # the product 0.75
        residual = torch.full((m, 1), 2048.5).to(torch.float32)
        y = ops.linear(backend.put(x), w, None, "f16", residual=backend.put(residual))
        assert torch.equal(y.cpu(), torch.full((m, 1), 2049.25).half()), m


# ---- gated MLPs


@pytest.mark.parametrize("activation", _C.activations())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_gated_mlp(name: str, dtype: torch.dtype, activation: str, backend: Backend) -> None:
    """act(s n Gᵀ) * (n Uᵀ), n = x or its norm; gate and up of one and of two formats."""
    k, n = formats.get(name).block_values * 4, 11
    gate = random_weight(name, n, k)
    # Gate and up of about 4, so that f16 holds their product: a power of two, exact in each dtype.
    size = 2.0 ** round(math.log2(4 / float(spec(name, gate, k).norm(dim=1).mean())))
    g = (size * activations(k, seed="g")).to(dtype)
    for m, has_norm, other, scale in (
        *((1, True, name, 1), (1, True, name, 0.625), (2, True, name, 1), (19, True, name, -1.5)),
        *((0, False, name, 1), (1, False, name, 0.625), (5, False, "f32", 1), (5, False, name, 3)),
    ):
        up = random_weight(other, n, k, seed=1)
        x = sized_rows(m, k, dtype) if has_norm else size * activations(m, k, dtype=dtype)
        operand = normal_operand(x, g, size, backend, m == 1) if has_norm else Value.of(x)
        a, b = (
            operand.dot(spec(f, w, k), k + 8, halved=backend.halves(None, dtype, f, (m, n, k)))
            for f, w in ((name, gate), (other, up))
        )
        norm = {"norm_weight": backend.put(g), "eps": EPS, "offset": size} if has_norm else {}
        apart = backend.put_view(torch.cat([up, up], 1)[:, : up.shape[1]])  # its rows, not gate's
        given = (backend.put(x), backend.put(gate), apart, name, other, activation)
        y = ops.swiglu(*given, **norm, gate_scale=scale)
        assert y.dtype == dtype
        a = a if scale == 1 else a * scale
        check(y, (activated(a, activation) * b).store(dtype), f"{name} M={m} norm={has_norm}")


@pytest.mark.parametrize("activation", _C.activations())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_gated_down(name: str, dtype: torch.dtype, activation: str, backend: Backend) -> None:
    """(act(gate) * up) Wᵀ + bias + residual, gate and up with different strides."""
    k = backend.k(name)
    packed, bias = random_weight(name, 11, k), activations(11, dtype=dtype, seed="bias")
    for m in (0, 1, 5, 27):
        gate, up = 4 * activations(m, k, dtype=dtype), activations(k, m, dtype=dtype, seed="up").T
        residual = activations(m, 11, dtype=dtype, seed="residual")
        hidden = activated(Value.of(gate), activation) * Value.of(up)
        halved = backend.halves(None, dtype, name, (m, 11, k))
        product = hidden.dot(spec(name, packed, k), halved=halved)
        for addends in ((None, None), (bias, residual)):
            want = product
            for t in addends:
                want = want if t is None else want + Value.of(t)
            b, r = (backend.put(t) for t in addends)
            put = backend.put(gate), backend.put_view(up), backend.put(packed)
            y = ops.swiglu_linear(*put, b, name, activation, r)
            assert y.dtype == dtype
            check(y, want.store(dtype), f"{name} M={m} addends={b is not None}")


@pytest.mark.parametrize("activation", _C.activations())
def test_activations_everywhere(activation: str, backend: Backend) -> None:
    """From the smallest to the largest gate: no NaN, and the bound holds."""
    gate = torch.cat([torch.linspace(-30, 30, 3001), 2.0 ** torch.linspace(-40, 40, 95)])
    gate = torch.cat([gate, -gate])
    gate = gate[: len(gate) // 32 * 32].view(-1, 32)
    up = torch.ones_like(gate)
    w = backend.put(torch.eye(32))
    y = ops.swiglu_linear(backend.put(gate), backend.put(up), w, None, "f32", activation)
    check(y, activated(Value.of(gate), activation).store(torch.float32), activation)


def test_gated_down_of_rows_that_overlap(backend: Backend) -> None:
    """torch's activations keep such strides in a permuted form."""
    packed = random_weight("f32", 5, 32)
    gate, up = activations(39).unfold(0, 32, 1), activations(8, 32, seed=1)
    args = (backend.put(up), backend.put(packed), None, "f32")
    y = ops.swiglu_linear(backend.put_view(gate), *args)
    assert torch.equal(y, ops.swiglu_linear(backend.put(gate.contiguous()), *args))


def test_weights_of_rows_of_one_value(backend: Backend) -> None:
    w = activations(1, 5).t()
    y = ops.linear(backend.put(torch.full((1, 1), 2.0)), backend.put_view(w), None, "f32")
    assert torch.equal(y.cpu(), 2 * w.t())


# ---- rope


def angles(batch: int, positions: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = 3 * activations(batch, positions, rotated, seed="angle")
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "positions", "heads", "kv_heads", "dim", "part"),
    [(1, 1, 4, 2, 64, 64), (3, 5, 3, 1, 48, 16), (2, 3, 2, 2, 128, 96), (2, 2, 5, 1, 6, 2)],
)
def test_rope(
    batch: int,
    positions: int,
    heads: int,
    kv_heads: int,
    dim: int,
    part: int,
    dtype: torch.dtype,
    interleaved: bool,
    backend: Backend,
) -> None:
    """q, k and v of the merged projection, normalised where asked, q and k rotated."""
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    wide = activations(batch, positions, sum(sizes) + 7, dtype=dtype)
    qkv = wide[..., 3:-4]
    g = {
        "q_norm": activations(dim, dtype=dtype, seed="q"),
        "k_norm": activations(dim, seed="k"),
    }
    whole = {
        "q_norm": activations(heads * dim, seed="all q"),
        "k_norm": activations(kv_heads * dim, dtype=dtype, seed="all k"),
    }
    for rows, norms, split in (
        *((1, {}, False), (batch, g, False), (batch, {}, True), (1, g, True)),
        *((1, {name: weight}, False) for name, weight in (*g.items(), *whole.items())),
        *((1, whole, False), (batch, whole, True)),
    ):
        cos, sin = angles(rows, positions, part, torch.float32 if split else dtype)
        parts = [t.unflatten(-1, (-1, dim)).transpose(1, 2) for t in qkv.split(sizes, -1)]
        want = []
        for x, weight in zip(parts[:2], (norms.get("q_norm"), norms.get("k_norm")), strict=True):
            head = Value.of(x) if weight is None else normed_heads(x, weight, EPS, 1.0)
            want.append(rotated(head, cos, sin, interleaved).store(dtype))
        of_v = normalized(parts[2], None, EPS).store(dtype)
        qk = qkv[..., : sum(sizes[:2])] if split else qkv
        more = {"v": backend.put_view(qkv[..., sum(sizes[:2]) :])} if split else {}
        if norms:
            put = {name: backend.put(weight) for name, weight in norms.items()}
            more |= {**put, "eps": EPS, "offset": 1.0}
        given = backend.put_view(qk), backend.put(cos), backend.put(sin), heads, kv_heads
        q, k, v = ops.rope(*given, interleaved=interleaved, **more)
        for got in (q, k, v):
            assert got.dtype == dtype and got.is_contiguous()
        check(q, want[0], "q")
        check(k, want[1], "k")
        assert torch.equal(v.cpu(), parts[2])
        more["eps"] = EPS
        others = ops.rope(*given, interleaved=interleaved, v_norm=True, **more)
        assert torch.equal(others[0], q) and torch.equal(others[1], k)
        check(others[2], of_v, "v")


def test_rope_without_angles_only_moves(backend: Backend) -> None:
    """R = 0, and no positions at all."""
    qkv = activations(2, 3, 4 * 8, dtype=torch.float16)
    none = backend.put(torch.empty(1, 3, 0))
    q, k, v = ops.rope(backend.put(qkv), none, none, 2, 1)
    heads = qkv.unflatten(-1, (4, 8)).transpose(1, 2)
    assert torch.equal(torch.cat([q, k, v], 1).cpu(), heads)
    q, k, v = ops.rope(backend.put(qkv[:, :0]), none[:, :0], none[:, :0], 2, 1)
    assert q.shape == (2, 2, 0, 8) and k.shape == v.shape == (2, 1, 0, 8)


# ---- rope_tables


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_tables(dtype: torch.dtype, backend: Backend) -> None:
    """Angles up to 2^21: within 2^-23 of cos and sin of the f32 angle; each layout; axes."""
    inv_freq = 1.0 / 1e4 ** (torch.arange(24) / 24)
    places = torch.cat((torch.arange(9), 3 ** torch.arange(14), torch.tensor([0, 2**21 - 1])))
    positions = torch.stack((places, places.flip(0), places // 2)).view(3, 1, -1).repeat(1, 2, 1)
    axes = torch.arange(24) % 3
    for rows, own in ((positions[0], None), (positions, axes)):
        chosen = rows[..., None] if own is None else rows[own].permute(1, 2, 0)
        angle = (chosen.float() * inv_freq).double()
        put = backend.put_view(rows), backend.put(inv_freq), backend.put(own)
        for twice, interleaved in ((False, False), (True, False), (True, True)):
            given = {"twice": twice, "interleaved": interleaved, "scale": 1.25, "dtype": dtype}
            made = ops.rope_tables(*put, **given)
            for got, exact in zip(made, (angle.cos(), angle.sin()), strict=True):
                if twice:
                    exact = exact.repeat_interleave(2, -1) if interleaved else exact.repeat(1, 1, 2)
                want = Value(exact, torch.full_like(exact, 2.0**-23)) * 1.25
                assert got.dtype == dtype and got.is_contiguous()
                check(got, want.rounded().store(dtype), f"{twice} {interleaved}")
    assert ops.rope_tables(put[0][:, :0], *put[1:])[0].shape == (0, len(places), 48)

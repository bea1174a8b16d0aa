"""route against float64 within derived bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend, leaf
from inputs import activations, packed_weight
from oracle import DTYPES, Value, check, gamma, linear_apart, spec
from recurrent_oracle import exp, summed
from torch import Tensor

from torch_metalmm.formats import DTYPE_NAMES

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules

# Experts, choices, options.
CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (8, 2, {}),
    (5, 5, {"renormalise": True, "scale": 0.5}),
    (130, 8, {"renormalise": True}),
    (64, 6, {"scoring": "sigmoid", "scale": -2.5}),
    (96, 8, {"scoring": "sigmoid", "choice_bias": 1, "groups": 8, "kept_groups": 4}),
    (64, 6, {"groups": 32, "kept_groups": 3, "group_best": 1, "scale": 16.0}),
    (33, 4, {"choice_bias": 1, "renormalise": True}),
    (256, 32, {"scoring": "sigmoid", "choice_bias": 1, "groups": 8, "kept_groups": 2}),
    (1, 1, {"renormalise": True}),
)


def route64(logits: Value, k: int, given: dict[str, Any]) -> tuple[Value, Tensor]:
    """Weights with their bounds, and ids, which no rounding may change."""
    if given.get("scoring") == "sigmoid":
        # 1 / (1 + e^-l): the slope is at most 1 / 4
        scores = Value(logits.exact.sigmoid(), logits.error / 4).rounded(5)
    else:
        most = logits.exact.amax(-1, keepdim=True)
        powers = exp(logits + Value(-most, logits.error.amax(-1, keepdim=True)))
        scores = divided(powers, summed(powers, -1))
    keys = logits
    bias, groups = given.get("choice_bias"), given.get("groups", 1)
    if bias is not None or groups > 1:
        keys = scores if bias is None else scores + Value.of(bias)
    chosen, slack = keys.exact.detach().clone(), float(keys.error.detach().max())
    if groups > 1:
        best = chosen.unflatten(-1, (groups, -1)).topk(given.get("group_best", 2)).values.sum(-1)
        count = given["kept_groups"]
        assert ordered(best, count) > 4 * slack
        kept = torch.zeros_like(best).scatter(-1, best.topk(count).indices, 1)
        chosen[kept.repeat_interleave(chosen.shape[-1] // groups, -1) == 0] = -torch.inf
    assert ordered(chosen, k) > 2 * slack
    ids = chosen.topk(k).indices
    weights = Value(scores.exact.gather(-1, ids), scores.error.gather(-1, ids))
    if given.get("renormalise"):
        weights = divided(weights, summed(weights, -1))
    return weights * given.get("scale", 1.0), ids


def divided(a: Value, total: Value) -> Value:
    """a / total of each row; total + 1e-20 rounds once more."""
    b, e = total.exact[..., None], total.error[..., None]
    error = (a.error + a.exact.abs() * e / b) / (b - e)
    return Value(a.exact / b, error).rounded(2)


def ordered(keys: Tensor, k: int) -> float:
    """The smallest gap between the k largest of a row and what follows each."""
    best = keys.sort(-1, descending=True).values[..., : k + 1]
    return float(-best.diff().max()) if best.shape[-1] > 1 else torch.inf


def distinct(tokens: int, experts: int, dtype: torch.dtype, seed: Any) -> Tensor:
    """Logits that are 1 / 32 apart at least, exact in every dtype."""
    order = activations(tokens, experts, seed=seed).argsort(-1)
    return ((order - experts // 2).float() / 32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_route_of_logits(number: int, dtype: torch.dtype, backend: Backend) -> None:
    """Rows of a wider tensor; the bias and that of the choice in f32."""
    experts, k, options = CASES[number]
    logits = distinct(7, experts + 3, dtype, number)[:, 1 : experts + 1]
    given, bias = dict(options), activations(experts, seed=("bias", number))
    if "choice_bias" in given:
        given["choice_bias"] = activations(experts, seed=("choice", number)) / 4
    put = {n: backend.put(v) for n, v in given.items()}
    for added in (None, bias):
        want, ids = route64(
            Value.of(logits) if added is None else Value.of(logits) + Value.of(added), k, given
        )
        weights, got = ops.route(backend.put_view(logits), k, None, backend.put(added), **put)
        assert weights.dtype == torch.float32 and got.dtype == torch.int64
        assert torch.equal(got.cpu(), ids)
        check(weights, want, f"{number} {added is not None}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_route_with_its_product(tokens: int, dtype: torch.dtype, backend: Backend) -> None:
    """Logits are not rounded to the dtype of x."""
    x = activations(tokens, 96, dtype=dtype, seed=tokens)
    w = activations(16, 96, dtype=dtype, seed="w")
    given = {"scoring": "sigmoid", "renormalise": True}
    want, ids = route64(Value.of(x).dot(w), 4, given)
    weights, got = ops.route(backend.put(x), 4, backend.put(w), format=DTYPE_NAMES[dtype], **given)
    assert torch.equal(got.cpu(), ids)
    check(weights, want, str(tokens))


def test_route_with_a_shared_expert(backend: Backend) -> None:
    """Behind the others, by its own logit alone; with gradient."""
    x, logit = distinct(5, 12, torch.float32, "x"), activations(5, 1, seed="shared") * 4
    for given in ({"renormalise": True, "scale": 0.5}, {"scoring": "sigmoid", "groups": 3}):
        want, ids = ops.route(backend.put(x), 4, **given)
        weights, got = ops.route(backend.put(x), 4, shared=backend.put(logit), **given)
        assert torch.equal(got[:, :4], ids) and (got[:, 4:] == 12).all()
        assert torch.equal(weights[:, :4], want)
        factor = Value.of(logit).exact.sigmoid()
        check(weights[:, 4:], Value(factor, 0 * factor).rounded(5), "shared")
        own = leaf(logit, backend)
        ops.route(backend.put(x), 4, shared=own, **given)[0][:, 4].sum().backward()
        slope = factor * (1 - factor)
        assert (own.grad.cpu().double() - slope).abs().max() <= gamma(16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_route_with_the_row_of_a_shared_expert(
    tokens: int, dtype: torch.dtype, backend: Backend
) -> None:
    """Behind W, with which it is read, before it, elsewhere, and in a format of its own."""
    x = activations(tokens, 96, dtype=dtype, seed=tokens)
    both = backend.put(activations(18, 96, dtype=dtype, seed="w"))
    w, name = both[1:17], DTYPE_NAMES[dtype]
    given = {"scoring": "sigmoid", "renormalise": True, "format": name}
    want, ids = route64(Value.of(x).dot(w.cpu()), 4, given)
    rows = [(row, name, Value.of(x).dot(row.cpu())) for row in (both[17:], both[:1])]
    rows.append((rows[0][0].clone(), *rows[0][1:]))
    if dtype == torch.float32:
        packed = packed_weight("q8_0", 1, 96, "row")
        rows.append((backend.put(packed), "q8_0", linear_apart(x, "q8_0", packed)))
    for i, (row, form, logit) in enumerate(rows):
        weights, got = ops.route(
            backend.put(x), 4, w, **given, shared_weight=row, shared_format=form
        )
        assert torch.equal(got[:, :4].cpu(), ids) and (got[:, 4:] == 16).all()
        check(weights[:, :4], want, f"{i}")
        factor = Value(logit.exact.sigmoid(), logit.error / 4).rounded(5)
        check(weights[:, 4:], factor, f"shared {i}")
        nothing = ops.route(
            backend.put(x[:0]), 4, w, **given, shared_weight=row, shared_format=form
        )
        assert [t.shape for t in nothing] == [(0, 5)] * 2


@pytest.mark.parametrize("row", ["q4_0", "iq4_nl"])
def test_packed_rows_of_a_shared_expert_and_their_gradient(row: str, backend: Backend) -> None:
    """It shares memory with W, as in MLX checkpoints, also where such bytes are another format."""
    x, packed = activations(3, 96, seed="x") / 4, packed_weight("q4_0", 9, 96, "all")
    both, w = backend.put(packed), spec("q4_0", packed[:8], 96)
    own = spec(row, packed[8:], 96)
    given = {"format": "q4_0", "shared_weight": both[8:], "shared_format": row}
    logits = linear_apart(x, "q4_0", packed[:8])
    logit = linear_apart(x, row, packed[8:]) if row == "q4_0" else Value.of(x).dot(own, 96 + 8)
    want, ids = route64(logits, 2, given)
    factor = Value(logit.exact.sigmoid(), logit.error / 4).rounded(5)
    moved = leaf(x, backend)
    weights, got = ops.route(moved, 2, both[:8], **given)
    assert torch.equal(got[:, :2].cpu(), ids)
    check(weights[:, :2].detach(), want, "routed")
    check(weights[:, 2:].detach(), factor, "shared")
    x64 = x.double().requires_grad_()
    scores = (x64 @ w.double().T).softmax(-1).gather(1, ids)
    made = torch.cat([scores, (x64 @ own.double().T).sigmoid()], 1)
    grads = [
        torch.autograd.grad((t * torch.arange(1.0, 4.0).to(t)).sum(), of)[0].cpu().double()
        for t, of in ((weights, moved), (made, x64))
    ]
    assert (grads[0] - grads[1]).norm() <= gamma(4 * 96) * grads[1].norm() * 9


def test_equals_nan_and_far_out(backend: Backend) -> None:
    """Equal experts in their order; NaN first; logits that leave all others nothing."""
    ties = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0]])
    assert ops.route(backend.put(ties), 4)[1].tolist() == [[1, 2, 4, 0]]
    nan = torch.tensor([[0.0, 1.0, torch.nan, 2.0, torch.nan], [-torch.inf] * 4 + [0.0]])
    weights, ids = ops.route(backend.put(nan), 3, scoring="sigmoid")
    assert ids.tolist() == [[2, 4, 3], [4, 0, 1]]
    assert weights.isnan().tolist() == [[True, True, False], [False] * 3]
    far = torch.tensor([[-3e4, 3e4, 2e4, -2e4, 1e4]])
    for scoring, chosen in (("softmax", [1.0, 0.0, 0.0]), ("sigmoid", [1.0, 1.0, 1.0])):
        weights, ids = ops.route(backend.put(far), 3, scoring=scoring)
        assert weights.tolist() == [chosen] and ids.tolist() == [[1, 2, 4]]
    low = ops.route(backend.put(far - 4e4), 3, scoring="sigmoid", renormalise=True)[0]
    assert low.tolist() == [[0.0] * 3]  # where nothing is left to divide
    assert ops.route(backend.put(far[:0]), 3)[0].shape == (0, 3)


def test_gradients(backend: Backend) -> None:
    """x has one through the weights, by softmax and sigmoid, with a product and without."""
    x, w = activations(3, 64, seed=("x", 2)), activations(12, 64, seed="w") / 4
    bias, choice = activations(12, seed="b"), activations(12, seed="c")
    for scoring in ("softmax", "sigmoid"):
        given = {"scoring": scoring, "renormalise": scoring == "sigmoid", "scale": 1.5}
        moved, b = leaf(x, backend), leaf(bias, backend)
        weights, ids = ops.route(
            moved, 3, backend.put(w), b, choice_bias=backend.put(choice), **given
        )
        exact = [t.double().requires_grad_() for t in (x, bias)]
        logits = Value.of(exact[0]).dot(w) + Value.of(exact[1])
        want, chosen = route64(logits, 3, given | {"choice_bias": choice})
        assert torch.equal(ids.cpu(), chosen)
        sums = [(t * torch.arange(3.0).to(t)).sum() for t in (weights, want.exact)]
        got = torch.autograd.grad(sums[0], (moved, b))
        for a, e in zip(got, torch.autograd.grad(sums[1], exact), strict=True):
            error = (a.cpu().double() - e).norm()
            assert error <= gamma(4 * 64) * e.norm() * 12  # sums of 64 terms over 12 experts

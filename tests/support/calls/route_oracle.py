"""What route must return: weights with their bounds, and ids that no rounding may change."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Value
from recurrent_oracle import exp, summed
from torch import Tensor


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
    chosen = keys.exact.clone()
    if groups > 1:
        best = chosen.unflatten(-1, (groups, -1)).topk(given.get("group_best", 2)).values.sum(-1)
        count = given["kept_groups"]
        error = 4 * keys.error.max()
        assert ordered(best, count) > error
        kept = torch.zeros_like(best).scatter(-1, best.topk(count).indices, 1)
        chosen[kept.repeat_interleave(chosen.shape[-1] // groups, -1) == 0] = -torch.inf
    assert ordered(chosen, k) > 2 * keys.error.max()
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

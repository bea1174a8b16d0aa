"""Random steps with changes between them: whatever happens, the next is the model's own."""

from __future__ import annotations

import random
from typing import Any

import torch
from backends import CASES as HOW_MANY
from layer_models import layers
from replay_pair import KINDS, Pair, fused
from torch import Tensor, nn

from torch_metalmm.hf.replay import replayed

_ACTS = ("crop", "reorder", "repeat", "select", "weight", "hook", "eps", "adapter", "dtype")


class _Added(nn.Module):
    """A layer with an addend, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + 0.5 * y.flip(-1)


def test_random_steps_with_changes() -> None:
    models = {kind: fused(kind) for kind in KINDS}
    count = 10_000 if HOW_MANY == "all" else 24
    for number in range(count):
        r = random.Random(number)
        model = models[r.choice(KINDS)]
        norm = layers(model)[1].input_layernorm
        before = norm.weight.detach().clone(), dict(vars(norm))
        pair = Pair(model, r.choice(("f16", "q8_0/q8_0")), r.choice((1, 2)))
        pair.step(r.randrange(2, 70))
        for i in range(12):
            act = r.choice((*_ACTS, *[""] * 27))
            _change_model(model, act, i)
            _change_caches(pair, act, i)
            pair.step(r.choice((1, 1, 1, 1, 1, 2)), seed=i)
        if isinstance(model.lm_head, _Added):
            _change_model(model, "adapter", 0)
        model.float()
        norm.weight.data.copy_(before[0])
        vars(norm).update(before[1])
    replays = sum(steps.replays for steps in map(replayed, models.values()) if steps is not None)
    assert replays > 2 * count


def _change_model(model: Any, act: str, i: int) -> None:
    norm = layers(model)[1].input_layernorm
    if act == "weight":
        norm.weight.data.mul_(1.25)
    elif act == "eps":
        name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
        setattr(norm, name, 0.01 * i)
    elif act == "hook":
        norm.register_forward_hook(lambda *_: None).remove()
    elif act == "adapter":
        head = model.lm_head
        model.lm_head = head.inner if isinstance(head, _Added) else _Added(head)
    elif act == "dtype":
        model.to(torch.bfloat16 if model.dtype == torch.float32 else torch.float32)


def _change_caches(pair: Pair, act: str, i: int) -> None:
    for cache in pair.caches:
        if act == "crop":
            cache.crop(-(i % 2))
        elif act == "reorder":
            cache.reorder_cache(torch.arange(pair.batch - 1, -1, -1))
        elif act == "repeat" and pair.batch < 3:
            cache.batch_repeat_interleave(2)
        elif act == "select":
            cache.batch_select_indices(torch.tensor([0]))
    pair.batch = pair.caches[0].layers[0].keys.shape[0]

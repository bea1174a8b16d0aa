"""A model whose steps are replayed beside its own forward."""

from __future__ import annotations

import copy
import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import layer_models
import torch
from layer_models import ids, layers
from torch import Tensor

from bench.models.families import LINEAR
from torch_metalmm import PackedCache
from torch_metalmm.hf.replay import Replayed, replayed
from torch_metalmm.testing import emulated

KINDS = ("llama", "qwen3", "gemma3_text")
HYBRID = "qwen3_5_text"  # a linear layer and one that attends
WINDOW = 64
_OPTIONS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": WINDOW},
    HYBRID: LINEAR,
}


def on(engine: str) -> AbstractContextManager[Any]:
    return emulated() if engine == "emulator" else nullcontext()


def fused(kind: str = "llama", cache: str = "q8_0/q8_0") -> Any:
    return copy.deepcopy(_fused(kind, cache))


@functools.cache
def _fused(kind: str, cache: str) -> Any:
    return layer_models.fused(kind, cache, head_dim=32, **_OPTIONS.get(kind, {}))


def unfused(model: Any, layer: int, eps: float = 0.01) -> Any:
    """The model, where this layer computes itself: eps of its norm is not what fuse_ saw."""
    norm = layers(model)[layer].input_layernorm
    setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", eps)
    return model


def held(layer: Any) -> list[Tensor]:
    """What a layer of a cache has for the tokens to come."""
    if hasattr(layer, "end"):
        return [t[:, :, : layer.end] for t in (layer.keys, layer.values)]
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [t for t in states if t is not None]


def steps_of(model: Any) -> Replayed:
    found = replayed(model)
    assert found is not None
    return found


class Pair:
    """A model whose steps are replayed, and the same model's own forward."""

    def __init__(self, model: Any, format: str | None, batch: int = 1) -> None:
        self.model, self.steps, self.batch = model, steps_of(model), batch
        self.caches: list[Any] = [PackedCache(model.config, format) for _ in range(2)]

    def step(self, count: int = 1, seed: int = 0, **given: Any) -> Tensor:
        """Both take a step; the logits, which are equal to the bit."""
        tokens = ids(self.batch, count, seed=seed).to(self.model.device)
        with torch.no_grad():
            got: Tensor = self.model(
                input_ids=tokens, past_key_values=self.caches[0], **given
            ).logits
            own = type(self.model).forward
            want = own(self.model, input_ids=tokens, past_key_values=self.caches[1], **given).logits
        assert torch.equal(got, want), self.steps.why
        for mine, others in zip(*(c.layers for c in self.caches), strict=True):
            for a, b in zip(held(mine), held(others), strict=True):
                assert torch.equal(a, b)
        return got

    def go_on(self, steps: int = 1, count: int = 1, **given: Any) -> int:
        """How many of so many steps are replays."""
        before = self.steps.replays
        for seed in range(steps):
            self.step(count, seed=seed, **given)
        return self.steps.replays - before

    def replays(self) -> bool:
        """Whether the last of a few steps is a replay."""
        self.go_on(3)
        return bool(self.go_on())

    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()


def recorded(model: Any = None) -> Pair:
    """A pair behind a prompt and its first replay."""
    pair = Pair(model or fused(), "q8_0/q8_0")
    pair.step(5)
    assert pair.replays(), pair.steps.why
    return pair

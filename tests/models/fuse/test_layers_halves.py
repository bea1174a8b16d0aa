"""Layers of experts: their attention's half is fused, and the MLP is called as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from expert_models import expert_model
from layer_models import are_fused, layers, padded

from bench.models.op_counts import Calls
from torch_metalmm import PackedCache, fuse_, quantize_

# {architecture: kernels of one token in the last layer, those of experts, router, cache and
# attention included: (without fuse_, with fuse_)}
EXPERTS = {
    "Qwen3Moe": (48, 13),
    "Mixtral": (38, 15),
    "Olmoe": (48, 16),
    "GraniteMoe": (38, 13),
    "Glm4Moe": (58, 30),
    "Qwen2Moe": (45, 19),
    "Ernie4_5_Moe": (49, 21),
    "MiniMaxM2": (54, 20),
}


def pair(kind: str) -> tuple[Any, Any]:
    """The model, unfused and fused."""
    model = quantize_(expert_model(kind, max_position_embeddings=128), "q8_0", progress=False)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    assert all(are_fused(fused)) and not any(are_fused(model))
    return model, fused


def generated(model: Any, **options: Any) -> torch.Tensor:
    options |= {"max_new_tokens": 64, "do_sample": False, "eos_token_id": -1}
    made: torch.Tensor = model.generate(**padded(3, 7), **options)
    return made


def kernels(model: Any) -> int:
    """In the last layer, for one token, with torch's cache."""
    from transformers import DynamicCache

    cache, calls = DynamicCache(config=model.config), Calls()
    token = torch.tensor([[5]])
    with torch.no_grad():
        model(token.expand(1, 3), past_key_values=cache)
        calls.watch(layers(model))
        with calls:
            model(token, past_key_values=cache)
    ours, others = calls.of_layers[-1]
    return len(ours) + len(others)


@pytest.mark.parametrize("kind", EXPERTS)
def test_greedy_tokens_of_padded_prompts(kind: str) -> None:
    model, fused = pair(kind)
    assert torch.equal(generated(fused), generated(model))
    fused = fuse_(fused, "swiglu", cache="q8_0")
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, "q8_0")
    assert torch.equal(generated(fused), generated(model, past_key_values=cache))


@pytest.mark.parametrize("kind", EXPERTS)
def test_kernels_of_a_token(kind: str) -> None:
    assert tuple(map(kernels, pair(kind))) == EXPERTS[kind]

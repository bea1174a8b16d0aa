"""fuse_ on the decoder layers of transformers models: what they compute, and in how many ops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_models import FUSED, PARTS, are_fused, dense, exact, ids, layers, padded, small
from torch import Tensor

from bench.models.op_counts import Calls
from torch_metalmm import PackedCache, fuse_
from torch_metalmm.models.fuse.layers import fused_layer

BOTH = pytest.mark.parametrize("kind", FUSED)
# Sums of 96 products and fewer, in ten stages of each of two layers, each in another order.
NEAR = 2 * 10 * 96**0.5 * 2.0**-24


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    """The model, unfused and fused."""
    model = small(kind, **options)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    assert all(are_fused(fused)) and not any(are_fused(model))
    return model, fused


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs).logits
    return out


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The tokens, and their logits where there are some."""
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1} | options
    made = model.generate(**inputs, **arguments, output_logits=True, return_dict_in_generate=True)
    return made.sequences, torch.stack(made.logits)


def near(a: Tensor, b: Tensor, bound: float = NEAR) -> bool:
    return bool((a - b).double().norm() <= bound * b.double().norm())


@BOTH
def test_logits_are_as_near_to_float64_as_those_of_the_dense_model(kind: str) -> None:
    model, fused = pair(kind)
    decoded = dense(model)
    inputs = {"input_ids": ids(3, 9)}
    want = logits(exact(decoded), **inputs)
    own, got = (logits(m, **inputs).double() - want for m in (decoded, fused))
    assert got.norm() <= 2 * own.norm()
    assert near(logits(fused, **inputs), logits(model, **inputs))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    """The fused model rounds less often; its error from f32 is at most half more, by chance."""
    model, fused = pair(kind, dtype=dtype)
    inputs = {"input_ids": ids(3, 9)}
    want = logits(torch.nn.Module.float(dense(model)), **inputs)
    got, own = logits(fused, **inputs), logits(model, **inputs)
    assert got.dtype == own.dtype
    assert (got.float() - want).norm() <= 1.5 * (own.float() - want).norm()


@pytest.mark.covering
@BOTH
@pytest.mark.parametrize("way", ["padded", "beams", "assisted", "static", "long"])
@pytest.mark.parametrize("cache", ["transformers", "packed"])
def test_generation(kind: str, way: str, cache: str) -> None:
    """Ten tokens are past the sliding windows of 4; a prompt of 20 is, too, before the first."""
    options: dict[str, Any] = {
        "beams": {"num_beams": 3},
        "assisted": {"prompt_lookup_num_tokens": 3},
        "static": {"cache_implementation": "static", "disable_compile": True},
    }.get(way, {})
    inputs = {"padded": padded(3, 7), "static": padded(2, 7), "long": {"input_ids": ids(2, 20)}}
    given = inputs.get(way, {"input_ids": ids(1, 7)})
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    made = []
    for model in pair(kind):
        if cache == "packed":
            model.set_attn_implementation("metalmm")
            options.pop("cache_implementation", None)
            slots = 40 if way == "static" else None
            options["past_key_values"] = PackedCache(model.config, slots=slots)
        made.append(generated(model, given, **options))
    (want, own), (tokens, scores) = made
    assert torch.equal(tokens, want)
    assert near(scores, own, 10 * NEAR)  # each token's cache has the errors of those before


@BOTH
def test_a_token_takes_a_handful_of_ops(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel but ours, attention's and the cache's."""
    from transformers import DynamicCache
    from transformers.modeling_utils import AttentionInterface

    _, fused = pair(kind)
    cache = DynamicCache(config=fused.config)
    logits(fused, input_ids=ids(1, 3), past_key_values=cache)
    calls, get = Calls(), AttentionInterface.get_interface
    monkeypatch.setattr(cache, "update", calls.uncounted(cache.update))
    monkeypatch.setattr(
        AttentionInterface, "get_interface", lambda *args: calls.uncounted(get(*args))
    )

    calls.watch(layers(fused))
    with calls:
        logits(fused, input_ids=ids(1, 1), past_key_values=cache)
    # cos and sin of pairs are made once for all layers.
    pairs = kind in ("glm4", "helium", "ernie4_5")
    for index, (ours, others) in enumerate(calls.of_layers):
        assert ours == FUSED[kind][1]
        assert others == (["clone", "clone"] if pairs and index == 0 else [])


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_not_understood_is_called(kind: str) -> None:
    model = small(kind)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    recipes = [f.recipe for f in map(fused_layer, fused.modules()) if f is not None]
    assert [recipe.rest for recipe in recipes] == [None if PARTS[kind] else (None,)] * 2
    cores = " ".join(type(branch.core).__name__ for branch in recipes[0].branches)
    assert cores == (PARTS[kind] or "Heads")
    inputs = {"input_ids": ids(2, 40)}
    assert near(logits(fused, **inputs), logits(model, **inputs))

"""Layers of a convolution, of the gated delta rule in our ops: states, and what stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from bench.models.families import family
from bench.models.op_counts import Calls
from torch_metalmm import PackedCache, fuse_
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.nn.recipe import Delta, Short

pytestmark = pytest.mark.filterwarnings("ignore")

# As in test_layers.py, with four stages more (convolution, activation, unit keys, the rule), sums
# of 128 products and two layers.
NEAR = 2 * 2 * 14 * 128**0.5 * 2.0**-24


def both(kind: str, **options: Any) -> tuple[Any, Any]:
    model = family(kind, **options)
    return model, fuse_(copy.deepcopy(model), "swiglu")


def is_delta(model: Any) -> bool:
    fused = fused_layer(model.get_decoder().layers[0])
    return fused is not None and isinstance(fused.recipe.branches[0].core, Delta | Short)


def tokens(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(3, 320, (batch, length), generator=generator)


def run(model: Any, cache: Any, *parts: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(p, **with_cache(model, cache), **options).logits for p in parts], 1)


def assert_near(a: Tensor, b: Tensor, near: float = NEAR) -> None:
    assert float((a - b).norm()) <= near * float(b.norm())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "lfm2"])
def test_parts_of_a_prompt(kind: str) -> None:
    """A prompt, a prompt behind it, and steps leave the states of torch's own forward; so does the
    order of other sequences, and a cache that begins anew."""
    model, fused = both(kind)
    assert is_delta(fused)
    ids = tokens(2, 40)
    parts = ids.split([3, 30, 1, 1, 5], 1)
    caches = [DynamicCache(config=m.config) for m in (model, fused)]
    for _ in range(2):
        assert_near(run(fused, caches[1], *parts), run(model, caches[0], *parts))
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
        want, got = (c.layers[0] for c in caches)
        assert_near(got.conv_states[0], want.conv_states[0])
        if kind != "lfm2":
            assert_near(got.recurrent_states[0], want.recurrent_states[0])
        assert_near(run(fused, caches[1], ids[:, :2]), run(model, caches[0], ids[:, :2]))
        for cache in caches:
            cache.reset()
    assert_near(run(fused, None, ids, use_cache=False), run(model, None, ids, use_cache=False))


def test_ops_of_a_step() -> None:
    """Norm and projections; convolution; rule; gated norm; output; and the two of an MLP."""
    _, fused = both("qwen3_5_text")
    cache = PackedCache(fused.config, "q8_0")
    run(fused, cache, tokens(1, 3))
    calls = Calls()
    calls.watch(fused.get_decoder().layers)
    with calls:
        run(fused, cache, tokens(1, 1))
    ours, others = calls.of_layers[0]
    names = ["norm_linear", "causal_conv", "gated_delta", "rms_norm", "linear", "swiglu", "linear"]
    assert [n.rpartition("::")[2].partition(".")[0] for n in ours] == names and not others


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_models(dtype: torch.dtype) -> None:
    model = family("qwen3_5_text").to(dtype)
    assert is_delta(fuse_(copy.deepcopy(model), "swiglu"))


class Cut(nn.Module):
    """Another gated norm: it cuts its gate."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) * gate.clamp(-1, 1)


def test_another_rule_stays_as_it_is() -> None:
    """A convolution with gelu, and a gated norm that is not silu's."""
    model = family("qwen3_5_text", hidden_act="gelu")
    assert not is_delta(fuse_(copy.deepcopy(model), "swiglu"))
    model = family("qwen3_5_text")
    mixer = model.get_decoder().layers[0].linear_attn
    mixer.norm = Cut(mixer.norm)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    assert not is_delta(fused)
    ids = tokens(1, 6)
    assert_near(run(fused, None, ids), run(model, None, ids))


def test_the_own_forward_where_ours_says_less() -> None:
    """A gradient of what has none in our ops, and a cache that keeps inputs to go back."""
    model, fused = both("qwen3_5_text")
    ids = tokens(1, 9)
    for m in (model, fused):
        m(ids, use_cache=False).logits.sum().backward()
    weights = (m.get_decoder().layers[0].linear_attn.conv1d.weight for m in (model, fused))
    want, got = (w.grad for w in weights)
    assert got is not None and want is not None
    assert_near(got, want, 2 * NEAR)  # there and back
    logits = []
    for m in (model, fused):
        cache = DynamicCache(config=m.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        run(m, cache, ids[:, :4], ids[:, 4:])
        assert cache.layers[0].conv_states[0].shape[-1] == 9
        logits.append(run(m, cache, ids[:, :1]))
    assert_near(logits[1], logits[0])

"""A PackedCache in another mode, dtype or model than the one that filled it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_llama, token_ids
from torch._dynamo.testing import CompileCounter
from transformers import MistralConfig

from torch_metalmm import PackedCache, fuse_, quantize_
from torch_metalmm.hf.caches.layers import SLACK

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def fused(**options: Any) -> Any:
    model = tiny_llama(**options)
    quantize_(model, "q8_0", progress=False)
    return fuse_(model, "swiglu", cache="q8_0")


def test_a_compiled_model_is_not_compiled_for_each_token() -> None:
    """A graph for the first token, and one for any length."""
    model, ids, counter = fused(), token_ids(1, 16), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter)
    ours, theirs = (PackedCache(model.config, "q8_0") for _ in range(2))
    with torch.no_grad():
        for cache in (ours, theirs):
            model(ids[:, :4], past_key_values=cache)
        for token in ids[:, 4:].split(1, 1):
            got = compiled(token, past_key_values=ours).logits
            want = model(token, past_key_values=theirs).logits
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("slots", [None, 400])
@pytest.mark.parametrize("format", [None, "q8_0"])
def test_a_prefix_of_inference_mode_goes_on(format: str | None, slots: int | None) -> None:
    """Outside of it: also where the rows have grown, or become those of beams, in it."""
    ids, longer = token_ids(2, 10), token_ids(2, 300)
    for act in ("", "grow", "repeat", "reorder", "crop"):
        layer = PackedCache(tiny_llama().config, format, slots).layers[0]
        k = torch.zeros(2, 2, longer.shape[1] if act == "grow" else ids.shape[1], 64)
        with torch.inference_mode():
            layer.update(k[:, :, :4], k[:, :, :4])
            layer.update(k[:, :, 4:], k[:, :, 4:])
            if act == "repeat" and slots is None:
                layer.batch_repeat_interleave(2)
            elif act == "reorder":
                layer.reorder_cache(torch.tensor([1, 1] if slots else [1, 1, 0]))
            elif act == "crop":
                layer.crop(-2)
        new = torch.zeros(layer.keys.shape[0], 2, 1, 64)
        layer.update(new, new)
        assert int(layer.get_seq_length()) == k.shape[2] + (-1 if act == "crop" else 1), act
        layer.reorder_cache(torch.arange(len(new)))


def test_a_window_of_inference_mode_goes_on() -> None:
    config = MistralConfig(num_hidden_layers=1, sliding_window=8, layer_types=["sliding_attention"])
    layer = PackedCache(config, "q8_0").layers[0]
    with torch.inference_mode():
        for count in (600, 1, 1):
            layer.update(*[torch.zeros(1, 2, count, 64)] * 2)
    for _ in range(SLACK):  # the rows of the window move once
        layer.update(*[torch.zeros(1, 2, 1, 64)] * 2)
    assert layer.get_seq_length() == 602 + SLACK


@pytest.mark.parametrize("format", [None, "q8_0"])
def test_rows_become_the_dtype_of_new_keys(format: str | None) -> None:
    """A prefix of an f32 model in a bf16 one, whose queries are bf16."""
    model, ids = tiny_llama(), token_ids(1, 12)
    for attention in ("sdpa", "metalmm"):
        cache = PackedCache(model.config, format)
        model.float().set_attn_implementation(attention)
        with torch.no_grad():
            model(ids[:, :6], past_key_values=cache)
            out = model.bfloat16()(ids[:, 6:], past_key_values=cache).logits
        assert out.dtype == torch.bfloat16 and cache.layers[0].dtype == torch.bfloat16


@pytest.mark.parametrize("slots", [None, 40])
@pytest.mark.parametrize("format", ["f32", "q8_0"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_keys_of_another_model_are_refused(format: str, slots: int | None, is_fused: bool) -> None:
    """Those of one head would be copied to both."""
    other = fused(num_key_value_heads=1) if is_fused else tiny_llama(num_key_value_heads=1)
    cache = PackedCache(other.config, format, slots)
    for layer in cache.layers:
        layer.update(*[torch.zeros(1, 2, 3, 64)] * 2)
    match = "keys of 1 heads of 64 values; it has 2 of 64"
    with torch.no_grad(), pytest.raises(ValueError, match=match):
        other(token_ids(1, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="keys of 2 heads of 32 values; it has 2 of 64"):
        cache.update(*[torch.zeros(1, 2, 1, 32)] * 2, 0)
    cache.reset()
    with torch.no_grad():
        assert other(token_ids(1, 3), past_key_values=cache).logits.isfinite().all()


def test_a_cache_of_slots_keeps_its_batch() -> None:
    layer = PackedCache(tiny_llama().config, "q8_0", slots=40).layers[0]
    layer.update(*[torch.zeros(2, 2, 3, 64)] * 2)
    with pytest.raises(ValueError, match="reorder_cache: 3 sequences; .* keeps its 2"):
        layer.reorder_cache(torch.tensor([0, 1, 1]))

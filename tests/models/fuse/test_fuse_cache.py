"""fuse_(model, cache=...): the cache that generate() makes where its caller names none."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from layer_models import are_fused, fused, ids, padded, small
from torch import nn
from transformers import DynamicCache, StaticCache

from torch_metalmm import PackedCache, fuse_, unfuse_
from torch_metalmm.hf.generation import default_cache

pytestmark = pytest.mark.usefixtures("quiet_transformers")

HEAD = {"head_dim": 32}


def model_of(kind: str = "llama", cache: str | None = None, **options: Any) -> Any:
    """Fused; its heads have a block of 32 values."""
    return fused(kind, cache, **(HEAD | options))


def made(model: Any, given: dict[str, Any], **options: Any) -> Any:
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None} | options
    if isinstance(given, torch.Tensor):
        given = {"input_ids": given, "attention_mask": torch.ones_like(given)}
    torch.manual_seed(3)
    return model.generate(**given, **arguments, return_dict_in_generate=True)


def tokens(model: Any, given: Any, **options: Any) -> list[list[int]]:
    return made(model, given, **options).sequences.tolist()


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8_0", "Q4_0"])
def test_generate_makes_the_cache(format: str) -> None:
    """The tokens are those of the cache given by hand."""
    model = model_of(cache=format)
    out = made(model, ids(2, 7))
    assert type(out.past_key_values) is PackedCache
    name = format.lower()
    assert out.past_key_values.format == (f"f16/{name}" if name.startswith("q") else name)
    assert model.config._attn_implementation == "metalmm"
    cache = PackedCache(model.config, format)
    assert out.sequences.tolist() == tokens(model, ids(2, 7), past_key_values=cache)
    assert cache.get_seq_length() == out.past_key_values.get_seq_length() == 16
    assert made(model, ids(2, 7)).past_key_values is not out.past_key_values


@pytest.mark.parametrize(
    ("kind", "format"),
    [("llama", "f32"), ("mistral", "f32"), ("gemma2", "f16"), ("gemma3_text", "f32")],
)
def test_the_tokens_are_those_of_dynamic_cache(kind: str, format: str) -> None:
    """Left padding, beams, sampling, assistants, prompt lookup; windows that end before."""
    model = model_of(kind, format)
    plain = unfuse_(copy.deepcopy(model))
    assert type(made(plain, ids(1, 3)).past_key_values) is DynamicCache
    kinds = {"layer_types": ["sliding_attention"]} if kind == "gemma3_text" else {}
    assistant = model_of(kind, format, num_hidden_layers=1, **kinds)
    repeating = ids(1, 5).repeat(1, 3)
    ways: list[tuple[Any, dict[str, Any]]] = [
        (padded(3, 7), {}),
        (ids(2, 20), {"num_beams": 3, "num_return_sequences": 2}),
        (padded(2, 6), {"do_sample": True, "top_k": 20}),
        (ids(2, 9), {"num_beams": 2, "do_sample": True}),
    ]
    for given, options in ways:
        assert tokens(model, given, **options) == tokens(plain, given, **options), options
    for given in (ids(1, 9), repeating):
        want = tokens(plain, given)
        assert tokens(model, given, prompt_lookup_num_tokens=3) == want
        assert tokens(model, given, assistant_model=assistant) == want
        assert tokens(plain, given, assistant_model=assistant) == want


def test_what_the_caller_names_counts() -> None:
    model = model_of(cache="q8_0")
    given = ids(1, 5)
    own = DynamicCache(config=model.config)
    assert made(model, given, past_key_values=own).past_key_values is own
    for name, kind in (("dynamic", DynamicCache), ("static", StaticCache)):
        out = made(model, given, cache_implementation=name, disable_compile=True)
        assert type(out.past_key_values) is kind
    assert made(model, given, use_cache=False).past_key_values is None
    with torch.no_grad():
        assert type(model(given).past_key_values) is DynamicCache


def test_unfuse_and_other_formats() -> None:
    model = model_of()
    model.set_attn_implementation("eager")
    assert default_cache(model) is None
    fuse_(model, cache="q8_0")
    fuse_(model)  # changes no cache
    assert made(model, ids(1, 4)).past_key_values.format == "f16/q8_0"
    fuse_(model, cache="f16")
    assert made(model, ids(1, 4)).past_key_values.format == "f16"
    unfuse_(model)
    assert model.config._attn_implementation == "eager" and default_cache(model) is None
    assert type(made(model, ids(1, 4)).past_key_values) is DynamicCache
    fuse_(model, cache="f16")
    model.set_attn_implementation("sdpa")  # the user's own choice stays
    assert type(made(model, ids(1, 4)).past_key_values) is PackedCache
    assert unfuse_(model).config._attn_implementation == "sdpa"
    fuse_(fuse_(model, cache="f16"), cache="q8_0")
    model.set_attn_implementation("eager")
    assert fuse_(model, cache="f16").config._attn_implementation == "metalmm"
    assert unfuse_(model).config._attn_implementation == "sdpa"


def test_copies_are_models_of_their_own() -> None:
    model = model_of(cache="q8_0")
    want = tokens(model, ids(2, 7))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = default_cache(other)
        assert found is not None and found.model is other and all(are_fused(other))
        assert tokens(other, ids(2, 7)) == want
        unfuse_(other)
    assert default_cache(model) is not None and tokens(model, ids(2, 7)) == want


def test_a_saved_model_has_no_trace(tmp_path: Path) -> None:
    model = model_of(cache="q8_0")
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text() + (
        tmp_path / "generation_config.json"
    ).read_text()
    assert "attn_implementation" not in text and "cache_implementation" not in text
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa" and default_cache(loaded) is None


def test_adapters() -> None:
    """A model of PEFT generates by the model inside; layers with adapters call update()."""
    peft = pytest.importorskip("peft")
    model = model_of(cache="f32")
    want = tokens(unfuse_(copy.deepcopy(model)), ids(2, 7))
    config = peft.LoraConfig(target_modules=["o_proj"], r=4, init_lora_weights=True)
    adapted = peft.get_peft_model(model, config).eval()
    out = made(adapted, ids(2, 7))
    assert type(out.past_key_values) is PackedCache and out.sequences.tolist() == want
    with pytest.warns(UserWarning, match="layers with adapters are not fused"):
        fuse_(adapted, cache="q8_0")
    assert made(adapted, ids(2, 7)).past_key_values.format == "f16/q8_0"
    adapted.train()
    adapted(input_ids=ids(2, 7), labels=ids(2, 7)).loss.backward()


def test_a_text_model_in_another() -> None:
    """The config of the part that is cached gets the attention function, no other part."""
    config = transformers.LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
        text_config=small("llama", **HEAD).config.to_dict() | {"quantization_config": None},
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    fuse_(model, cache="q8_0")
    assert config.text_config._attn_implementation == "metalmm"
    assert config.vision_config._attn_implementation == config._attn_implementation == "sdpa"
    assert made(model, ids(1, 5)).past_key_values.format == "f16/q8_0"
    unfuse_(model)
    assert config.text_config._attn_implementation == "sdpa"


def test_a_part_that_generates() -> None:
    """generate() of Blip2 makes embeddings and calls generate() of its language model."""
    one = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Blip2Config(
        vision_config=one | {"intermediate_size": 64, "image_size": 28, "patch_size": 14},
        qformer_config=one | {"intermediate_size": 64, "encoder_hidden_size": 32},
        text_config=small("llama", **HEAD).config.to_dict() | {"quantization_config": None},
        num_query_tokens=2,
        image_token_index=7,
    )
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    given = {"pixel_values": torch.randn(1, 3, 28, 28), "input_ids": torch.tensor([[7, 7, 3, 4]])}
    want = tokens(model, given)
    fuse_(model, cache="q8_0")
    out = made(model, given)
    assert type(out.past_key_values) is PackedCache and out.past_key_values.format == "f16/q8_0"
    fuse_(model, cache="f32")
    assert tokens(model, given) == want
    unfuse_(model)
    assert config.text_config._attn_implementation == "sdpa"
    assert type(made(model, given).past_key_values) is DynamicCache


ERRORS: dict[str, tuple[Any, str]] = {
    "unknown": ("q9_0", "cache: unknown 'q9_0'; allowed: f32, .*; did you mean q8_0"),
    "a number": (8, "cache: 8; must be the name of a format"),
    "large blocks": ("q4_k", "cache: 'q4_k'; its blocks of 256 values do not divide the 32 of a"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_refused_changes_nothing(case: str) -> None:
    format, message = ERRORS[case]
    model = small("llama", **HEAD)
    with pytest.raises(ValueError, match=message):
        fuse_(model, cache=format)
    assert not any(are_fused(model)) and default_cache(model) is None
    assert model.config._attn_implementation == "sdpa"


def test_models_without_a_cache() -> None:
    for model in (nn.Linear(2, 2), small("llama", **HEAD).model):
        with pytest.raises(ValueError, match="cache: 'f16'; the model is none of transformers"):
            fuse_(model, cache="f16")
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=32)
    )
    with pytest.raises(ValueError, match="cache: 'f16'; BartForConditionalGeneration has an enc"):
        fuse_(bart, cache="f16")

"""save_gguf and the config: the types of what it writes, what it compares, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from converted_models import logits, random_model, write_record
from gguf import GGUFReader, GGUFValueType
from gguf_files import fields_of, load_quietly

from torch_metalmm import save_gguf

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def small(kind: str, **values: Any) -> Any:
    config = getattr(transformers, kind + "Config")(**SIZES | values)
    return getattr(transformers, kind + "ForCausalLM")(config).eval()


def refuses(model: Any, folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_gguf(model, None, folder / "x.gguf")
    assert list(folder.iterdir()) == []


def types_of(path: Path) -> dict[str, GGUFValueType]:
    return {key: field.types[0] for key, field in GGUFReader(path).fields.items()}


# Types of values


def test_whole_numbers_of_float_keys_are_floats(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    model = random_model("granite")
    for name in ("embedding", "residual", "attention"):
        setattr(model.config, f"{name}_multiplier", 2)
    model.config.logits_scaling = 8
    save_gguf(model, None, path)
    types, fields = types_of(path), fields_of(path)
    for key, value in {
        "embedding_scale": 2,
        "residual_scale": 2,
        "attention.scale": 2,
        "logit_scale": 8,
        "rope.freq_base": 700,
        "attention.layer_norm_rms_epsilon": pytest.approx(model.config.rms_norm_eps),
    }.items():
        assert types[f"granite.{key}"] == GGUFValueType.FLOAT32, key
        assert fields[f"granite.{key}"] == value, key
    assert types["granite.embedding_length"] == GGUFValueType.UINT32


def test_whole_numbers_of_yarn_are_floats(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    model = random_model("ministral3")
    model.config.rope_parameters |= {"factor": 4, "beta_fast": 32, "beta_slow": 1}
    save_gguf(model, None, path)
    for key in ("factor", "yarn_beta_fast", "yarn_beta_slow"):
        assert types_of(path)[f"mistral3.rope.scaling.{key}"] == GGUFValueType.FLOAT32, key
    assert types_of(path)["mistral3.rope.scaling.original_context_length"] == GGUFValueType.UINT32


@pytest.mark.parametrize("value", [-1, 1 << 32, 2.5, float("inf"), [8, 8], True])
def test_values_that_are_no_uint32(tmp_path: Path, value: Any) -> None:
    model = small("Llama")
    object.__setattr__(model.config, "max_position_embeddings", value)
    refuses(model, tmp_path, "GGUF's context_length is .*its config has")


# What is compared


def test_what_ordinary_checkpoints_also_have(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    extras = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "auto_map": {"AutoConfig": "config.Some"},
        "cache_implementation": "hybrid",
        "id2label": {0: "a", 1: "b", 2: "c"},
    }
    models = {
        "Llama": extras,
        "Qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1},
        "Phi3": {"resid_pdrop": 0.5, "embd_pdrop": 0.5},
    }
    for kind, values in models.items():
        save_gguf(small(kind, **values), None, path, replace=True)
        assert fields_of(path)["general.architecture"] == kind.lower()


def test_attributes_that_models_read_are_compared(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    refuses(small("Qwen2", **window), tmp_path, "its config has layer_types = ")
    refuses(small("Mistral", sliding_window=8), tmp_path, "its config has sliding_window = 8")


def test_layers_that_predict_further_tokens_are_no_part_of_a_model(tmp_path: Path) -> None:
    """Checkpoints of DeepSeek V3 state 1 or 0 of them; transformers' models have none."""
    for count in (0, 1):
        model = random_model("deepseek-v3", num_nextn_predict_layers=count)
        save_gguf(model, None, tmp_path / "x.gguf", replace=True)
        assert fields_of(tmp_path / "x.gguf")["deepseek2.block_count"] == len(model.model.layers)


@pytest.mark.parametrize("groups", [None, 1])
def test_experts_that_are_one_group(tmp_path: Path, groups: int | None) -> None:
    """None is the default of DeepSeek V2's config; how groups are chosen changes nothing then."""
    values = {"n_group": groups, "topk_group": groups, "topk_method": "greedy"}
    model = random_model("deepseek-v2", **values)
    _, tokenizer, _ = load_quietly(write_record(tmp_path / "a.gguf", "deepseek-v2"))
    save_gguf(model, tokenizer, tmp_path / "x.gguf")
    again, _, _ = load_quietly(tmp_path / "x.gguf")
    assert torch.allclose(logits(again), logits(model), rtol=0, atol=1e-5)


# Models that no file describes


def test_groups_of_experts_that_a_model_ignores(tmp_path: Path) -> None:
    model = random_model("deepseek-v2", topk_method="greedy")
    refuses(model, tmp_path, "its config has topk_method = 'greedy'.* 'group_limited_greedy'")


def test_clipped_queries_of_olmoe(tmp_path: Path) -> None:
    """llama.cpp clips those of OLMo alone."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2}
    refuses(small("Olmoe", clip_qkv=8.0, **sizes), tmp_path, "its config has clip_qkv = 8.0")
    save_gguf(small("Olmoe", **sizes), None, tmp_path / "x.gguf")


def test_a_model_without_a_head(tmp_path: Path) -> None:
    refuses(small("Llama").model, tmp_path, "LlamaModel has no output head")


def test_attention_in_both_directions(tmp_path: Path) -> None:
    model = small("Gemma", head_dim=32, tie_word_embeddings=True)
    model.config.use_bidirectional_attention = True
    refuses(model, tmp_path, "no key of GGUF says use_bidirectional_attention")
    model.config.use_bidirectional_attention = None
    save_gguf(model, None, tmp_path / "x.gguf")


@pytest.mark.parametrize("high", [4.0, 1.0])  # of Llama 3 and of Llama 4
def test_scaling_that_is_divisors(tmp_path: Path, high: float) -> None:
    """Where llama.cpp reads them, and the formula is Llama 3's."""
    rope, path = LLAMA3 | {"high_freq_factor": high}, tmp_path / "x.gguf"
    message = "GGUF files of olmo2 models have no tensor for rope_type = 'llama3'"
    refuses(small("Olmo2", rope_parameters=dict(rope)), tmp_path, message)
    other = small("Llama", rope_parameters=rope | {"low_freq_factor": 0.5})
    refuses(other, tmp_path, "its config has rope_parameters = .*finds")
    model = small("Llama", rope_parameters=dict(rope))
    save_gguf(model, None, path)
    (divisors,) = (t.data for t in GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    plain = 5e5 ** (-torch.arange(16, dtype=torch.float64) / 16)
    made = plain / torch.from_numpy(np.array(divisors))
    assert torch.allclose(made.float(), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("log", [0.5, 1.0])
def test_the_scale_of_yarn(tmp_path: Path, log: float) -> None:
    """llama.cpp takes mscale as 1, whatever yarn_log_multiplier is."""
    model = random_model("ministral3")
    model.config.rope_parameters["mscale_all_dim"] = log
    for mscale in (1.0, 0.75):
        model.config.rope_parameters["mscale"] = mscale
        if mscale != 1.0:
            refuses(model, tmp_path, "its config has rope_parameters = .*finds")
            continue
        save_gguf(model, None, tmp_path / "x.gguf")
        fields = fields_of(tmp_path / "x.gguf")
        assert fields["mistral3.rope.scaling.yarn_log_multiplier"] == log
        (tmp_path / "x.gguf").unlink()
    write_record(tmp_path / "a.gguf", "ministral3")
    read = load_quietly(tmp_path / "a.gguf")[0].config.rope_parameters
    assert read["mscale"] == 1.0


@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_latent_whose_yarn_says_no_scale(tmp_path: Path, scale: float | None) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4} | {
        "original_max_position_embeddings": 32,
        "mscale_all_dim": scale,
    }
    model = random_model("deepseek-v2", rope_parameters=yarn)
    refuses(model, tmp_path, f"'yarn' and mscale_all_dim = {scale}; without a number")

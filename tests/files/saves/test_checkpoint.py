"""save_packed and load_packed: what comes back, what is written, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import random_model
from hf_models import IDS, change_config, logits, same_bytes
from hf_models import random_model as tiny_model
from safetensors import safe_open
from torch import nn

from torch_metalmm import QuantLinear, load_gguf, load_packed, quantize_, save_packed
from torch_metalmm.files.folder import is_packed


def small_llama(tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model("llama", dtype, tie_word_embeddings=tied)


@pytest.mark.quick
@pytest.mark.parametrize("tied", [True, False])
def test_loaded_model_gives_identical_logits(tmp_path: Path, tied: bool) -> None:
    model = quantize_(small_llama(tied), {"*mlp*": "q4_k", "*": "affine4_g64"}, progress=False)
    model.generation_config.max_new_tokens = 7
    save_packed(model, None, tmp_path / "a" / "b")
    loaded, tokenizer = load_packed(tmp_path / "a" / "b")
    assert tokenizer is None and type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.model.layers[0].mlp.up_proj.format == "q4_k"
    assert loaded.generation_config.max_new_tokens == 7
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.quick
def test_files_and_config(tmp_path: Path) -> None:
    model = quantize_(small_llama(), {"*proj": "q8_0", "lm_head": "q6_k"}, progress=False)
    save_packed(model, None, tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    quant = config["quantization_config"]
    assert quant["quant_method"] == "metalmm"
    assert quant["modules"]["lm_head"] == quant["modules"]["model.embed_tokens"] == "q6_k"
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        packed = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert packed.dtype == torch.uint8 and packed.shape == (512, 272)


def test_dtype_is_the_saved_one_or_the_one_asked_for(tmp_path: Path) -> None:
    model = quantize_(small_llama(dtype=torch.bfloat16), "q4_0", progress=False)
    save_packed(model, None, tmp_path)
    loaded, _ = load_packed(tmp_path)
    assert loaded.dtype == loaded.model.embed_tokens.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))
    loaded, _ = load_packed(tmp_path, dtype=torch.float32)
    assert loaded.dtype == torch.float32 and logits(loaded).dtype == torch.float32


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35", "t5"])
def test_gguf_models_round_trip(tmp_path: Path, architecture: str) -> None:
    path = random_model(tmp_path / "m.gguf", architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # T5's: what is decoded, see test_gguf
        model, tokenizer = load_gguf(path)
    save_packed(model, tokenizer, tmp_path / "packed")
    loaded, again = load_packed(tmp_path / "packed")
    assert same_bytes(loaded, model)
    extra = {"decoder_input_ids": IDS} if architecture == "t5" else {}
    with torch.inference_mode():
        assert torch.equal(loaded(IDS, **extra)[0], model(IDS, **extra)[0])
    orders = {n: m.input_order for n, m in model.named_modules() if hasattr(m, "input_order")}
    for name, order in orders.items():
        kept = loaded.get_submodule(name).input_order
        assert kept is None if order is None else torch.equal(kept, order)
    if architecture == "qwen35":
        assert any(order is not None for order in orders.values())
    text = "the man in the <|end|> room"
    assert again(text).input_ids == tokenizer(text).input_ids


def test_saving_over_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    save_packed(quantize_(small_llama(), "q8_0", progress=False), None, tmp_path)
    loaded, _ = load_packed(tmp_path)
    quantize_(loaded, {"*mlp*": "q4_0"}, progress=False)
    expected = logits(loaded)
    save_packed(loaded, None, tmp_path)
    assert torch.equal(logits(load_packed(tmp_path)[0]), expected)
    assert torch.equal(logits(loaded), expected)


def test_models_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no packed layer; call quantize_ first"):
        save_packed(small_llama(), None, tmp_path)
    model = nn.Sequential(QuantLinear(32, 4, False, "q8_0"))
    with pytest.raises(ValueError, match="must be a transformers model, got Sequential"):
        save_packed(model, None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_packed_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_packed(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_packed(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="not a packed model: .* None, not 'metalmm'"):
        load_packed(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_packed(tmp_path)
    assert not is_packed(tmp_path)


def test_folders_that_contradict_themselves(tmp_path: Path) -> None:
    model = quantize_(small_llama(), "q8_0", progress=False)
    save_packed(model, None, tmp_path)
    for change, message in (
        ({"num_hidden_layers": 3}, "has no tensor for model.layers.2"),
        ({"num_hidden_layers": 1}, "has tensors the model does not: model.layers.1"),
        ({"intermediate_size": 1024}, r"proj.weight must be U8 \[1024"),
    ):
        change_config(tmp_path, **{"num_hidden_layers": 2} | change)
        with pytest.raises(ValueError, match=message):
            load_packed(tmp_path)

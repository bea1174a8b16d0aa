"""save_pretrained of models that were packed by hand: the files load, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import logits, random_model, same_bytes
from torch import nn

from torch_metalmm import QuantEmbedding, QuantLinear, load_packed, quantize_, save_packed
from torch_metalmm.models.replace import replaceable


def save(model: Any, folder: Path, how: str) -> None:
    if how == "save_packed":
        save_packed(model, None, folder)
    else:
        model.save_pretrained(folder)


def llama(**config: Any) -> Any:
    return random_model("llama", num_hidden_layers=1, **config)


def linear(out: int = 320, bias: bool = False) -> QuantLinear:
    torch.manual_seed(1)
    return QuantLinear.from_linear(nn.Linear(256, out, bias=bias), "q8_0")


def by_hand(**given: str) -> Callable[[Any], None]:
    """{a part of the model: the format that it is packed in}."""

    def pack(model: Any) -> None:
        for part, format in given.items():
            owner = model.model.layers[0].mlp if part == "up_proj" else model
            owner = model.model if part == "embed_tokens" else owner
            layer = getattr(owner, part)
            is_table = isinstance(layer, nn.Embedding)
            made = QuantEmbedding.from_embedding if is_table else QuantLinear.from_linear
            setattr(owner, part, made(layer, format))

    return pack


def in_a_wrapper(model: Any) -> None:
    quantize_(nn.ModuleDict({"llm": nn.Sequential(model)}), {"*.mlp.*": "q8_0"}, progress=False)


PACKED: dict[str, Callable[[Any], object]] = {
    "head": by_hand(lm_head="q8_0"),
    "embedding": by_hand(embed_tokens="q8_0"),
    "one layer": by_hand(up_proj="q4_k"),
    "both apart": by_hand(lm_head="q8_0", embed_tokens="q8_0"),
    "two formats": by_hand(lm_head="q8_0", embed_tokens="q4_0"),
    "another head": lambda model: setattr(model, "lm_head", linear()),
    "in a wrapper": in_a_wrapper,
    "the base model": lambda model: quantize_(model.model, "q8_0", progress=False),
}


@pytest.mark.covering
@pytest.mark.parametrize("how", ["save_pretrained", "save_packed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("what", PACKED)
def test_what_is_packed_by_hand_loads(what: str, tied: bool, how: str, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=tied)
    PACKED[what](model)
    want = logits(model)
    save(model, tmp_path, how)
    for loaded in (type(model).from_pretrained(tmp_path), load_packed(tmp_path)[0]):
        assert same_bytes(loaded, model) and torch.equal(logits(loaded), want)
    save(loaded, tmp_path, how)  # and once more, over the first
    assert torch.equal(logits(load_packed(tmp_path)[0]), want)


class Pooled(nn.Module):
    """As sentence-transformers keep and save a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.auto_model = model

    def save(self, folder: Path) -> None:
        self.auto_model.save_pretrained(str(folder), safe_serialization=True)


def test_wrappers_that_save_what_is_inside(tmp_path: Path) -> None:
    wrapper = nn.Sequential(Pooled(random_model("bert").bert), nn.Linear(256, 32))
    quantize_(wrapper, "q8_0", progress=False)
    wrapper[0].save(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert same_bytes(loaded, wrapper[0].auto_model)
    assert torch.equal(logits(loaded), logits(wrapper[0].auto_model))


def shared_but_not_tied(model: Any) -> None:
    by_hand(embed_tokens="q8_0")(model)
    model.lm_head = model.model.embed_tokens.as_linear()


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "rows": (lambda m: setattr(m, "lm_head", linear(100)), "lm_head .* has 320 rows of 256"),
    "a bias": (
        lambda m: setattr(m, "lm_head", linear(bias=True)),
        "lm_head .* of 256, a bias",
    ),
    "no place": (lambda m: setattr(m, "extra", linear()), "extra .* no layer that can be packed"),
    "shared": (
        shared_but_not_tied,
        "embed_tokens .* a weight of its own for it",
    ),
}


@pytest.mark.parametrize("how", ["save_pretrained", "save_packed"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_be_loaded_is_not_saved(case: str, how: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    model = llama(tie_word_embeddings=False)
    change(model)
    with pytest.raises(ValueError, match=message):
        save(model, tmp_path, how)
    assert list(tmp_path.iterdir()) == []


def test_layers_whose_weight_the_model_reads_are_not_saved(tmp_path: Path) -> None:
    model = random_model("t5")
    name = "encoder.block.0.layer.1.DenseReluDense.wo"
    assert not replaceable(model, name)
    model.set_submodule(name, QuantLinear.from_linear(model.get_submodule(name), "q8_0"))
    with pytest.raises(ValueError, match=f"{name} .* no layer that can be packed"):
        model.save_pretrained(tmp_path)


def test_models_that_another_method_quantized(tmp_path: Path) -> None:
    model = llama()
    model.hf_quantizer = Path()
    by_hand(lm_head="q8_0")(model)
    with pytest.raises(ValueError, match="quantized by PosixPath, too; config.json"):
        model.save_pretrained(tmp_path)


def test_dense_models_are_saved_as_ever(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    assert (tmp_path / "model.safetensors").exists()  # transformers leaves it
    assert "quantization_config" not in (tmp_path / "config.json").read_text()

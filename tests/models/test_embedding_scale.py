"""Embeddings that are more than a table: scaled ones keep their scale, others stay dense."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_metalmm import QuantEmbedding, quantize_
from torch_metalmm.models.replace import packable

SCALE = 27.7  # no f16 or bf16 number, so it matters when it is rounded
IDS = torch.tensor([[3, 0, 7], [9, 1, 3]])
# {architecture: class}: rows times embed_scale, a tensor (Gemma) or a float (BART).
SCALED = {
    "gemma": "GemmaTextScaledWordEmbedding",
    "gemma3": "Gemma3TextScaledWordEmbedding",
    "gemma3n": "Gemma3nTextScaledWordEmbedding",
    "bart": "BartScaledWordEmbedding",
    "m2m_100": "M2M100ScaledWordEmbedding",
    "xglm": "XGLMScaledWordEmbedding",
}


def embedding(architecture: str, kind: str, *arguments: Any, **options: Any) -> Any:
    module = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    torch.manual_seed(0)
    return getattr(module, kind)(*arguments, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", SCALED)
def test_scaled_embeddings_keep_their_scale(architecture: str, dtype: torch.dtype) -> None:
    dense = embedding(architecture, SCALED[architecture], 10, 64, 1, SCALE).to(dtype)
    want = dense(IDS)
    packed = quantize_(nn.Sequential(dense), "f32", progress=False)[0]
    assert type(packed) is QuantEmbedding and packed.padding_idx == 1
    assert list(packed.state_dict()) == ["weight"]
    assert torch.equal(packed(IDS), want)
    assert torch.equal(packed.to(torch.float32)(IDS), dense.float()(IDS))


@pytest.mark.parametrize("architecture", SCALED)
def test_they_are_known_without_data(architecture: str) -> None:
    """Embeddings as from_pretrained makes them are known, and asking draws no random number."""
    with torch.device("meta"):
        dense = embedding(architecture, SCALED[architecture], 10, 64, 1, SCALE)
        torch.manual_seed(3)
        assert packable(dense)
    state = torch.get_rng_state()
    assert packable(dense) and torch.equal(torch.get_rng_state(), state)


def test_t5gemma2_keeps_the_row_of_its_own() -> None:
    """Its class has embed_scale too, and a parameter for the id 4."""
    dense = embedding(
        "t5gemma2", "T5Gemma2TextScaledWordEmbedding", 10, 64, 1, SCALE, eoi_token_index=4
    )
    dense.eoi_embedding.data.fill_(5.0)
    model = quantize_(nn.ModuleDict({"table": dense, "up": nn.Linear(64, 64)}), "q8_0")
    assert model["table"] is dense and dense(torch.tensor([4])).unique().tolist() == [5.0]


class Shifted(nn.Embedding):
    embed_scale = 2.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale + 1


@pytest.mark.parametrize(
    "dense",
    [
        lambda: Shifted(10, 64),
        lambda: embedding("bart", "BartLearnedPositionalEmbedding", 8, 64),
        lambda: embedding("whisper", "WhisperPositionalEmbedding", 10, 64),
        lambda: embedding("idefics", "IdeficsDecoupledEmbedding", 10, 2, 64),
        lambda: embedding("inkling", "InklingNormedEmbedding", 10, 64, 1, 1e-6),
        lambda: nn.Embedding(10, 64, max_norm=1.0),
    ],
)
def test_others_stay_dense(dense: Any) -> None:
    module = dense()
    model = quantize_(nn.ModuleDict({"table": module, "up": nn.Linear(64, 64)}), "q8_0")
    assert model["table"] is module and type(model["up"]).__name__ == "QuantLinear"


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("architecture", ["bart", "gemma3"])
def test_adapters_on_a_scaled_embedding_are_scaled_too(architecture: str, use_dora: bool) -> None:
    """A float scale: PEFT would round it to the dtype of the weight, bytes."""
    from lora_cases import lora, randomize
    from peft import get_peft_model

    outputs = []
    for format in (None, "f32"):
        table = embedding(architecture, SCALED[architecture], 10, 64, 1, SCALE)
        model = nn.ModuleDict({"table": table})
        if format is not None:
            quantize_(model, format, progress=False)
        model = get_peft_model(model, lora("table", use_dora=use_dora))
        randomize(model)
        outputs.append(model.base_model.model["table"](IDS))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("scale", [torch.empty((), device="meta"), torch.ones(8)], ids=str)
def test_scales_without_one_number_stay_dense(scale: torch.Tensor) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.embed_scale

    layer = Scaled(4, 32)
    layer.register_buffer("embed_scale", scale)
    assert not packable(layer)

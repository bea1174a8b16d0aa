"""LoRA files on packed transformers of image models, by a pipeline's load_lora_weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import decoded_product, packed_bytes, products_of, same_bytes
from image_models import IMAGES, noise, packed_transformer, pipeline
from oracle import Value, check, spec
from torch import Tensor, nn

from torch_metalmm import quantize_

BOTH = pytest.mark.parametrize("name", IMAGES)
LAYERS = {
    "transformer_blocks.0.attn.to_q": (256, 256),
    "transformer_blocks.0.ff.net.2": (256, 1024),
}


def adapter(layers: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """The tensors of a LoRA file of rank 4 for layers of these N and K; alpha is 4, too."""
    g, tensors = torch.Generator().manual_seed(0), {}
    for name, (n, k) in layers.items():
        for leaf, shape in (("A", (4, k)), ("B", (n, 4))):
            key = f"transformer.{name}.lora_{leaf}.weight"
            tensors[key] = torch.randn(shape, generator=g) / 16
    return tensors


def packed_pipeline(name: str, format: str) -> Any:
    pipe = pipeline(name)
    pipe.transformer = packed_transformer(name, format)
    return pipe


@BOTH
@pytest.mark.parametrize("format", ["q8_0", "q4_k", "f16"])  # a row has more bytes than K, or fewer
def test_an_adapter_adds_to_the_decoded_weights(name: str, format: str) -> None:
    pipe, tensors = packed_pipeline(name, format), adapter(LAYERS)
    alone, before = noise(pipe.transformer), packed_bytes(pipe.transformer)
    pipe.load_lora_weights(tensors)
    assert not torch.equal(noise(pipe.transformer), alone)
    seen = products_of(pipe.transformer, lambda: noise(pipe.transformer), LAYERS)
    assert seen.keys() == LAYERS.keys()
    for layer, (x, y) in seen.items():
        packed = pipe.transformer.get_submodule(layer).base_layer
        a, b = (tensors[f"transformer.{layer}.lora_{leaf}.weight"] for leaf in "AB")
        check(y, decoded_product(packed, x) + Value.of(x).dot(a).dot(b), layer)
    pipe.unload_lora_weights()
    after = packed_bytes(pipe.transformer)
    assert torch.equal(noise(pipe.transformer), alone) and after.keys() == before.keys()


@BOTH
def test_adapters_are_merged_and_taken_out_again(name: str) -> None:
    pipe = packed_pipeline(name, "q8_0")
    weights = [pipe.transformer.get_submodule(layer).weight.clone() for layer in LAYERS]
    alone = noise(pipe.transformer)
    pipe.load_lora_weights(adapter(LAYERS))

    def unchanged() -> list[bool]:
        layers = [pipe.transformer.get_submodule(layer).base_layer for layer in LAYERS]
        return [torch.equal(m.weight, w) for m, w in zip(layers, weights, strict=True)]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "packing .* merged layers again")
        pipe.fuse_lora(components=["transformer"])
    assert not any(unchanged()) and not torch.equal(noise(pipe.transformer), alone)
    pipe.unfuse_lora(components=["transformer"])
    assert all(unchanged())
    pipe.unload_lora_weights()
    assert torch.equal(noise(pipe.transformer), alone)


def test_a_control_adapter_widens_the_decoded_layer() -> None:
    """diffusers makes a dense layer of it, with zeros for the inputs that the model had not."""
    pipe = packed_pipeline("flux", "q8_0")
    packed = pipe.transformer.x_embedder
    w = spec("q8_0", packed.weight, 64)
    pipe.load_lora_weights(adapter(LAYERS | {"x_embedder": (256, 128)}))
    wide = pipe.transformer.x_embedder.base_layer
    assert type(wide) is nn.Linear and pipe.transformer.config.in_channels == 128
    assert torch.equal(wide.weight, torch.cat([w, torch.zeros(256, 64)], dim=1))
    assert torch.equal(wide.bias, packed.bias)
    kept = packed_bytes(pipe.transformer)
    assert {f"{layer}.base_layer" for layer in LAYERS} <= kept.keys() and wide not in kept


@BOTH
def test_what_cannot_be_done_under_adapters(name: str, tmp_path: Path) -> None:
    pipe = packed_pipeline(name, "q8_0")
    pipe.load_lora_weights(adapter(LAYERS))
    with pytest.raises(ValueError, match="attn.to_q.base_layer could not .* unload the adapters"):
        pipe.save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match="no layer .*attn.to_q.base_layer; adapters are unloaded"):
        pipe.transformer.dequantize()
    with pytest.raises(ValueError, match="attn.to_q.base_layer is of a layer with adapters"):
        quantize_(pipe.transformer, {"*.attn.to_q*": "q4_k"}, progress=False)
    quantize_(pipe.transformer, {"*.attn.to_k": "q4_0"}, progress=False)
    pipe.unload_lora_weights()
    want = quantize_(packed_transformer(name, "q8_0"), {"*.attn.to_k": "q4_0"}, progress=False)
    assert same_bytes(pipe.transformer, want)


def test_the_adapters_own_layers_are_not_packed() -> None:
    pipe = pipeline("sd3")
    pipe.load_lora_weights(adapter(LAYERS))
    alone = noise(pipe.transformer)
    with pytest.raises(ValueError, match=r"attn.to_q.\S+ is of a layer with adapters; pack the"):
        quantize_(pipe.transformer, "q8_0", progress=False)
    assert torch.equal(noise(pipe.transformer), alone) and not packed_bytes(pipe.transformer)


@pytest.mark.parametrize("format", ["q8_0", "q4_k"])
def test_an_adapter_of_fewer_inputs_gets_zeros(format: str) -> None:
    pipe, tensors = packed_pipeline("flux", format), adapter({"context_embedder": (256, 96)})
    given = tensors["transformer.context_embedder.lora_A.weight"]
    pipe.load_lora_weights(dict(tensors))
    (loaded,) = pipe.transformer.context_embedder.lora_A.values()
    assert torch.equal(loaded.weight, torch.cat([given, torch.zeros(4, 160)], dim=1))

"""PEFT's methods other than LoRA on packed layers: they train, or are refused by name."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from inputs import activations
from lora_cases import QUIET, Block, lora
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny_models import tiny_llama
from torch import Tensor, nn

from torch_metalmm import QuantLinear, quantize_
from torch_metalmm.models.lora.others import TRAINS

pytestmark = QUIET

# What a method needs besides target_modules.
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "IA3": {"feedforward_modules": []},
    "OFT": {"oft_block_size": 32},
}


class Decoded(QuantLinear):
    """Packed to whoever looks at it, but computed by torch on the decoded weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize())


def config(method: str, **options: Any) -> Any:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[method]]
    return kind(target_modules=["up"], **OPTIONS.get(method, {}), **options)


def adapted(method: str, layer: nn.Module) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(nn.ModuleDict({"up": layer}), config(method)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:  # most begin as the identity
                p.add_(torch.randn(p.shape) / 16)
    return model


@pytest.mark.parametrize("method", TRAINS)
def test_they_train_as_on_the_dense_layer(method: str) -> None:
    """Bit for bit: a method that reads the packed weight, even its shape, would differ."""
    packed = Decoded.from_linear(nn.Linear(256, 512, bias=False), "q8_0")
    dense = nn.Linear(256, 512, bias=False)
    dense.weight.data = packed.dequantize()
    x = activations(5, 256)
    results = []
    for layer in (dense, packed):
        model = adapted(method, layer)
        there = x.clone().requires_grad_()
        y = model.base_model.model.up(there)
        y.square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), "dx": there.grad, **grads})
    want, given = results
    assert any(g.abs().max() > 0 for n, g in want.items() if n not in ("y", "dx"))
    assert not torch.equal(want["y"], packed(x))  # the adapter counts
    assert given.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(given[name], value), name


@pytest.mark.parametrize("method", TRAINS)
def test_they_do_not_merge_and_no_byte_changes(method: str) -> None:
    """IA3, MiSS and RoAd would make other bytes of the bytes, without an error."""
    model = adapted(method, Block("q8_0").up)
    layer = model.base_model.model.up
    before = layer.get_base_layer().weight.clone()
    message = (
        rf"^{method.lower()} adapters cannot be merged: the weight of QuantLinear\(.*q8_0\) is"
    )
    for merge in (model.merge_adapter, model.merge_and_unload, layer.merge):
        with pytest.raises(ValueError, match=message):
            merge()
    assert torch.equal(layer.get_base_layer().weight, before) and not layer.merged
    assert model.unload()["up"].weight.equal(before)


NEED_DENSE = ("DEFT", "DELORA", "HIRA", "HRA", "LOHA", "LOKR", "SHIRA", "TRAINABLE_TOKENS")


@pytest.mark.parametrize("method", NEED_DENSE)
def test_methods_that_compute_with_the_weight_are_refused(method: str) -> None:
    model = nn.ModuleDict({"up": Block("q8_0").up})
    with pytest.raises(
        ValueError, match=rf"^{method} cannot be used on up, .*format=q8_0.*LORA, ADALORA, "
    ):
        get_peft_model(model, config(method))
    assert type(model["up"]) is QuantLinear


def test_mixed_models_are_refused() -> None:
    """PEFT makes its own LoRA layers in such models, as on no quantized layer of its own."""
    with pytest.raises(ValueError, match="^PeftMixedModel cannot be used on up, QuantLin"):
        get_peft_model(Block("q8_0"), lora("up"), mixed=True)


def test_lora_that_peft_made_without_us_does_not_merge() -> None:
    model = peft.LoraModel(Block("q8_0"), lora("up"), "default")
    with pytest.raises(
        ValueError, match="^lora adapters cannot be merged.*only LoRA by get_peft_model"
    ):
        model.merge_adapter()


def test_dense_layers_beside_packed_ones_take_and_merge_every_method() -> None:
    model = quantize_(tiny_llama(), {"*.up_proj": "q8_0"}, progress=False)
    options = {"target_modules": ["q_proj"], "feedforward_modules": []}
    adapted = get_peft_model(model, peft.IA3Config(**options))
    merged: Tensor = adapted.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert merged.is_floating_point()
    get_peft_model(model, peft.LoKrConfig(target_modules=["q_proj"])).merge_adapter()


@pytest.mark.parametrize("target", [["layers.1.mlp.up_proj"], r".*\.1\.mlp\.up_proj"], ids=str)
def test_a_dense_layer_may_share_its_last_name_with_a_packed_one(target: Any) -> None:
    model = quantize_(tiny_llama(), {"*.0.mlp.up_proj": "q8_0"}, progress=False)
    adapted = get_peft_model(model, peft.LoKrConfig(target_modules=target))
    assert any(
        "lokr" in name and ".1.mlp.up_proj" in name for name, _ in adapted.named_parameters()
    )


@pytest.mark.parametrize(
    "option", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}], ids=str
)
def test_copies_of_packed_layers_are_not_trained(option: dict[str, Any]) -> None:
    model = quantize_(tiny_llama(), "q8_0", progress=False)
    message = "need a dense layer, but Quant.*format=q8_0.* is packed: leave it dense"
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, lora("q_proj", **option))
    spec = {"lm_head": None, "*.embed_tokens": None, "*": "q8_0"}
    model = get_peft_model(quantize_(tiny_llama(), spec, progress=False), lora("q_proj", **option))
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    saved = [p.grad for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert len(saved) == 1 and saved[0].abs().max() > 0

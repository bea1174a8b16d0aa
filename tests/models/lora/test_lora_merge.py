"""Merging adapters of PEFT into packed weights, taking them out again, saving and loading them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from inputs import activations
from lora_cases import FORMATS, QUIET, SCALING, Block, adapted, delta, lora, randomize
from oracle import Value, check, gamma
from peft import PeftModel, get_peft_model
from tiny_models import tiny_llama, token_ids
from torch import Tensor, nn

from torch_metalmm import QuantLinear, formats, merge_errors, quantize_
from torch_metalmm.models.lora.report import MergeError

pytestmark = QUIET


@pytest.mark.parametrize("format", FORMATS)
def test_merged_bytes_and_reported_errors_are_the_specifications(format: str) -> None:
    model = adapted(format, "up", "down", bias=True)
    spec = formats.get(format)
    want: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name in ("up", "down"):
        layer = model.base_model.model.get_submodule(name)
        w = spec.dequantize(layer.base_layer.weight, layer.in_features)
        want[name] = w, w + delta(layer), spec.quantize(w + delta(layer))
    with pytest.warns(UserWarning, match=r"packing 2 merged layers again costs .* of the weight"):
        merged = model.merge_and_unload()
    assert type(merged) is Block and type(merged.up) is QuantLinear and merged.up.bias is not None
    errors = merge_errors(merged)
    assert set(errors) == {"up", "down"}
    for name, (before, dense, packed) in want.items():
        layer = merged.get_submodule(name)
        assert torch.equal(layer.weight, packed)
        decoded = spec.dequantize(packed, layer.in_features).double()
        error = (decoded - dense.double()).norm()
        # The norms are f32 sums of so many squares.
        slack = 3 * gamma(dense.numel())
        for got, size in (
            (errors[name].weight, dense.double().norm()),
            (errors[name].update, (dense.double() - before.double()).norm()),
        ):
            assert abs(got - error / size) <= slack * error / size


def test_merging_and_unmerging_gives_the_same_bytes_back() -> None:
    """Also after several adapters, one after the other; they are packed together, once."""
    model = adapted("q4_k", "up", "down", bias=True, lora_bias=True)
    model.add_adapter("other", lora("up"))
    randomize(model, "other", seed=1)
    up = model.base_model.model.up
    bytes_before, bias_before = up.base_layer.weight.clone(), up.base_layer.bias.clone()
    w = up.base_layer.dequantize()
    x = activations(5, 256)
    y = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that one was merged already
        model.merge_adapter(["default"])
        one = up.base_layer.weight.clone()
        model.merge_adapter(["other"])
    assert up.merged_adapters == ["default", "other"]
    both = formats.get("q4_k").quantize(w + delta(up) + delta(up, "other"))
    assert torch.equal(up.base_layer.weight, both) and not torch.equal(one, both)
    moved = up.lora_B["default"].bias.detach() * SCALING
    assert torch.equal(up.base_layer.bias, bias_before + moved)
    model.unmerge_adapter()
    assert up.merged_adapters == [] and merge_errors(model) == {}
    assert torch.equal(up.base_layer.weight, bytes_before)
    assert torch.equal(up.base_layer.bias, bias_before)
    assert torch.equal(model(x), y)


def test_an_untrained_adapter_merges_without_moving_a_byte() -> None:
    """The quantizer of q3_k would move some, if asked again."""
    model = get_peft_model(Block("q3_k"), lora("up"))
    layer = model.base_model.model.up.base_layer
    before = layer.weight.clone()
    assert not torch.equal(formats.get("q3_k").quantize(layer.dequantize()), before)
    merged = model.merge_and_unload()
    assert torch.equal(merged.up.weight, before)
    assert merge_errors(merged) == {"up": MergeError(0.0, 0.0)}


def test_disabled_and_mixed_adapters() -> None:
    model = adapted("q8_0", "up", "down")
    model.add_adapter("other", lora("up", "down"))
    randomize(model, "other", seed=1)
    x = activations(4, 256)
    base = Block("q8_0")(x)
    outputs = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        outputs[name] = model(x)
    with model.disable_adapter():
        assert torch.equal(model(x), base)
        model.merge_adapter()
        assert torch.equal(model(x), base)  # PEFT takes merged ones out of a disabled layer
    names = ["default", "other", "__base__", "default"]
    mixed = model.eval()(x, adapter_names=names)
    rows = [base[i] if n == "__base__" else outputs[n][i] for i, n in enumerate(names)]
    # Not the bits: PEFT multiplies the rows of one adapter at a time.
    torch.testing.assert_close(mixed, torch.stack(rows))


def test_columns_in_another_order_merge_where_they_belong() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    dense = activations(16, 64)
    layer = QuantLinear.from_packed(formats.get("f16").quantize(dense[:, order]), 64, "f16")
    layer.input_order = order
    model = get_peft_model(nn.Sequential(layer), lora("0"))
    randomize(model)
    want = dense.half().float() + delta(model.base_model.model[0])
    merged = model.merge_and_unload()[0]
    assert torch.equal(merged.dequantize(), want.half().float())


def test_a_tied_head_merges_without_the_embedding() -> None:
    """The embedding had no adapter: it keeps its bytes, the head gets its own."""
    model = quantize_(tiny_llama(tie_word_embeddings=True), "q8_0", progress=False)
    table = model.model.embed_tokens.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about tied weights
        merged = get_peft_model(model, lora("lm_head"))
        randomize(merged)
        merged = merged.merge_and_unload()
    assert torch.equal(merged.model.embed_tokens.weight, table)
    assert not torch.equal(merged.lm_head.weight, table)


def test_embeddings_take_adapters() -> None:
    model = adapted("q6_k", "table")
    layer = model.base_model.model.table
    ids = torch.tensor([[3, 15, 0]])
    w = formats.get("q6_k").dequantize(layer.base_layer.weight, 256)
    a, b = (p["default"].detach() for p in (layer.lora_embedding_A, layer.lora_embedding_B))
    low = Value.of(a.T[ids]).dot(b) * SCALING
    check(layer(ids), Value.of(w[ids]) + low, "embedding")
    merged = w + (b @ a).T * SCALING
    assert torch.equal(model.merge_and_unload().table.weight, formats.get("q6_k").quantize(merged))


# ---- files


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("embed_tokens", "q_proj")])
def test_adapters_are_saved_as_safetensors_and_loaded(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    def base() -> Any:
        return quantize_(tiny_llama(), "q4_k", progress=False)

    model = get_peft_model(base(), lora(*targets)).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    files = {f.name for f in tmp_path.iterdir()} - {"README.md"}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    ids = token_ids(2, 9)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not torch.equal(loaded(ids).logits, base()(ids).logits)

"""fuse_ on models of transformers: what it finds, and what else one does with such a model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import QUIET, lora, randomize
from peft import get_peft_model
from safetensors import safe_open
from tiny_models import VOCABULARY, tiny_llama, token_ids
from torch import nn

from torch_metalmm import (
    QuantLinear,
    fuse_,
    load_packed,
    merge_errors,
    quantize_,
    save_packed,
    unfuse_,
)
from torch_metalmm.nn.fused import LinearPart, MergedLinear, SwiGLU

pytestmark = QUIET

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"d_model": 256, "d_ff": 512, "num_layers": 1, "num_heads": 4, "vocab_size": VOCABULARY}
QKV = "self_attn.merged_q_proj_k_proj_v_proj"
# {architecture: (its sizes, the merged layers, whether its MLP has a gate)}
MODELS: dict[str, tuple[dict[str, Any], set[str], bool]] = {
    "llama": (SIZES, {QKV}, True),
    "phi": (SIZES, {QKV}, False),
    "phi3": (SIZES, set(), True),  # both are merged by the model
    "bert": (SIZES, {"self.merged_query_key_value"}, False),
    "t5": (T5, {"SelfAttention.merged_k_v", "EncDecAttention.merged_k_v"}, False),
}


def small(kind: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what T5 reads itself stays dense
        return quantize_(model, "q8_0", progress=False)


@pytest.mark.parametrize("kind", MODELS)
def test_architectures(kind: str) -> None:
    """A wrong role, part or order would change the output by as much as it is large."""
    sizes, merged, swiglu = MODELS[kind]
    model = small(kind, sizes)
    inputs = {"input_ids": token_ids(2, 7)}
    if kind == "t5":
        inputs["decoder_input_ids"] = token_ids(2, 5, seed=1)
    with torch.inference_mode():
        want = model(**inputs)[0]
        fuse_(model, "swiglu")
        got = model(**inputs)[0]
    names = {n: m for n, m in model.named_modules() if isinstance(m, MergedLinear)}
    assert {".".join(n.split(".")[-2:]) for n in names} == merged
    assert any(isinstance(m, SwiGLU) for m in model.modules()) == swiglu
    assert not any(m._held for m in names.values())
    assert (got - want).norm() < 1e-5 * want.norm()


def packed_llama(**options: Any) -> Any:
    return quantize_(tiny_llama(**options), "q4_k", progress=False)


@pytest.mark.parametrize("form", ["swiglu", "swiglu_linear"])
def test_a_fused_model_generates_the_same_tokens(form: str) -> None:
    model, ids = packed_llama(), token_ids(2, 6)
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    fuse_(model, form)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), want)


def test_a_fused_model_is_saved_as_it_was(tmp_path: Path) -> None:
    model = packed_llama(attention_bias=True)
    save_packed(model, None, tmp_path / "plain")
    fuse_(model, "swiglu")
    save_packed(model, None, tmp_path / "fused")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "fused" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        want = unfuse_(model).state_dict()
        assert set(file.keys()) == set(want)
        assert all(torch.equal(file.get_tensor(n), want[n]) for n in want)
    loaded, _ = load_packed(tmp_path / "fused")
    ids = token_ids(2, 6)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


# ---- adapters


def adapted(model: Any, *targets: str) -> Any:
    model = get_peft_model(model, lora(*targets)).eval()
    randomize(model)
    return model


TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")


def test_adapters_on_a_fused_model_count() -> None:
    """MLPs with adapters fall back, and so do q, k and v: parts that compute alone."""
    plain = adapted(packed_llama(), *TARGETS)
    model = adapted(fuse_(packed_llama(), "swiglu"), *TARGETS)
    ids = token_ids(2, 6)
    want = plain(ids).logits
    assert torch.equal(model(ids).logits, want)
    with model.disable_adapter():
        assert not torch.equal(model(ids).logits, want)
    for m in (plain, model):
        m(input_ids=ids, labels=ids).loss.backward()
    trained = {n: p.grad for n, p in plain.named_parameters() if "lora_" in n}
    assert len(trained) == 16
    for name, p in model.named_parameters():
        if "lora_" in name:
            assert (p.grad - trained[name]).norm() <= 1e-5 * trained[name].norm()


def test_merging_adapters_needs_unfusing() -> None:
    """The error comes before any layer is merged, whether fuse_ or the adapters came first."""
    targets = (*TARGETS, "o_proj", "embed_tokens")
    plain = adapted(packed_llama(), *targets).merge_and_unload()
    model = adapted(fuse_(packed_llama(), "swiglu"), *targets)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj is part of a fused layer"):
            merge()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    unfuse_(model)
    merged = model.merge_and_unload()
    assert len(merge_errors(merged)) == 11
    want = plain.state_dict()
    assert all(torch.equal(t, want[n]) for n, t in merged.state_dict().items())


def test_layers_with_adapters_are_not_fused() -> None:
    model = adapted(packed_llama(), "q_proj", "up_proj")
    ids = token_ids(2, 6)
    want = model(ids).logits
    with pytest.warns(UserWarning, match=r"with adapters are not fused: .*layers.\*.self_attn \(2"):
        fuse_(model, "swiglu")
    layer = model.base_model.model.model.layers[0]
    assert type(layer.self_attn.k_proj) is type(layer.self_attn.v_proj) is LinearPart
    assert type(layer.mlp.gate_proj) is QuantLinear
    assert (model(ids).logits - want).norm() <= 1e-5 * want.norm()


def test_a_copy_of_a_fused_model_trains_alone() -> None:
    model = fuse_(packed_llama(), "swiglu")
    other = adapted(copy.deepcopy(model), "q_proj")
    ids = token_ids(1, 4)
    want = model(ids).logits
    other(input_ids=ids, labels=ids).loss.backward()
    assert torch.equal(model(ids).logits, want)
    assert not any(isinstance(m, nn.Module) and hasattr(m, "lora_A") for m in model.modules())

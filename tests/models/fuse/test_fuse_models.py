"""fuse_ on models of transformers: what it finds, and what else one does with such a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import logits, random_model
from layer_models import near
from lora_cases import QUIET, lora, randomize
from peft import get_peft_model
from safetensors import safe_open
from tiny_models import tiny_llama, token_ids

from torch_metalmm import (
    QuantLinear,
    fuse_,
    load_packed,
    merge_errors,
    quantize_,
    save_packed,
    unfuse_,
)
from torch_metalmm.nn.fused import FusedMLP, MergedLinear

pytestmark = QUIET

QKV = "self_attn.merged_q_proj_k_proj_v_proj"
# {architecture: (the merged layers, whether its MLP has a gate)}
MODELS: dict[str, tuple[set[str], bool]] = {
    "llama": ({QKV}, True),
    "phi": ({QKV}, False),
    "phi3": (set(), True),  # both are merged by the model
    "bert": (set(), False),  # whose layers are not fused
    "t5": (set(), False),
}


@pytest.mark.filterwarnings("ignore:left dense", "ignore:K is not a multiple")  # of T5
@pytest.mark.parametrize("kind", MODELS)
def test_architectures(kind: str) -> None:
    """A wrong role, part or order would change the output by as much as it is large."""
    merged, swiglu = MODELS[kind]
    model = quantize_(random_model(kind), "q8_0", progress=False)
    want = logits(model)
    got = logits(fuse_(model, "swiglu"))
    names = {n: m for n, m in model.named_modules() if isinstance(m, MergedLinear)}
    assert {".".join(n.split(".")[-2:]) for n in names} == merged
    assert any(isinstance(m, FusedMLP) for m in model.modules()) == swiglu
    assert near(got, want)


def packed_llama(**options: Any) -> Any:
    return quantize_(tiny_llama(**options), "q4_k", progress=False)


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
            assert near(p.grad, trained[name])


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
    others = (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate_proj)
    assert [type(m) for m in others] == [QuantLinear] * 3
    assert near(model(ids).logits, want)

"""Layers of one input that fuse_ has merged: what they compute, how everything is undone and saved,
adapters beside them."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import hf_models
import oracle
import pytest
import torch
from backends import Backend, leaf
from fuse_cases import Attention, Gated, K, Model, decoded, merged
from inputs import activations
from layer_models import near
from lora_cases import QUIET, lora, randomize
from oracle import DTYPES, Value, check, spec
from peft import get_peft_model
from safetensors import safe_open
from tiny_models import tiny_llama, token_ids
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
from torch_metalmm.nn.fused import FusedMLP, LinearPart, MergedLinear

pytestmark = QUIET


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["q4_k", "affine4_g64", "bf16"])
def test_merged_layers_compute_what_they_did(
    format: str, dtype: torch.dtype, backend: Backend
) -> None:
    module = Attention((format,) * 3, bias=True)
    layers = [copy.deepcopy(layer) for layer in (module.a, module.b, module.c)]
    merged(module.to(backend.device))
    assert [type(m) for m in (module.a, module.b, module.c)] == [LinearPart] * 3
    assert type(module.out) is QuantLinear
    for shape in ((K,), (1, K), (2, 5, K), (0, K)):
        x = activations(*shape, dtype=dtype)
        given = backend.put(x)
        whole = module.merged_a_b_c
        y = torch.ops.metalmm.linear(given, whole.weight, whole.bias, whole.format)
        together = y.split([layer.out_features for layer in layers], -1)
        for both, layer in zip(zip(module(given), together, strict=True), layers, strict=True):
            want = oracle.linear(x, decoded(layer), layer.bias)
            for y in both:
                check(y, want, f"{format} {shape}")


def test_only_layers_of_one_format_are_merged() -> None:
    """And next to each other: their results are those of slices."""
    module = merged(Attention(("q4_k", "q4_k", "q6_k")))
    assert type(module.c) is QuantLinear and type(module.merged_a_b) is MergedLinear
    for formats in (("q4_k", "q6_k", "q4_k"), ("f16", "q6_k", "q8_0")):
        assert not any(isinstance(m, MergedLinear) for m in merged(Attention(formats)).modules())


def test_gradients_of_merged_layers(backend: Backend) -> None:
    """Moved after they were merged."""
    module, x = merged(Attention()).to(backend.device), leaf(activations(3, K), backend)
    g = [activations(3, n, seed=n) for n in (48, 16, 24)]
    (dx,) = torch.autograd.grad(module(x), x, [backend.put(t) for t in g])
    weights = [decoded(getattr(module, n)) for n in "abc"]
    check(dx, Value.of(torch.cat(g, 1)).dot(torch.cat(weights).T))


# ---- undoing, saving, moving


def fused_model() -> Model:
    model = Model()
    merged(model.attention)
    return fuse_(model, "swiglu")  # type: ignore[return-value]


def test_undoing_gives_the_modules_and_the_bytes_back_without_a_copy() -> None:
    model = Model()
    modules = dict(model.named_modules())
    state = {n: t.clone() for n, t in model.state_dict().items()}
    x = activations(2, K)
    y = model(x)
    weights = [weakref.ref(modules[f"attention.{n}"].weight) for n in "abc"]
    merged(model.attention)
    fuse_(model, "swiglu")
    assert [ref() for ref in weights] == [None] * 3  # the bytes exist once
    assert type(model.mlp) is FusedMLP and type(model.attention.a) is LinearPart
    of_all = model.attention.merged_a_b_c.weight.data_ptr()
    unfuse_(model)
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())
    layers = (model.attention.a, model.attention.b, model.attention.c)
    assert [t.weight.untyped_storage().data_ptr() for t in layers] == [of_all] * 3
    assert torch.equal(model(x), y)
    assert fuse_(model, "swiglu") is model and type(model.mlp) is FusedMLP


def test_a_fused_model_keeps_its_state_dict() -> None:
    model, want = fused_model(), Model().state_dict()
    state = model.state_dict()
    assert list(state) == list(want) and all(torch.equal(state[n], want[n]) for n in want)
    assert state._metadata["attention.a"]["formats"] == {"weight": "q4_k"}
    # The bytes exist once, although the parameters have other names.
    total = sum(p.nbytes for p in model.parameters())
    assert total == sum(t.nbytes for t in want.values())
    other = {n: t.flip(0) for n, t in want.items()}
    for assign in (False, True):
        model.load_state_dict(other, assign=assign)
        assert all(torch.equal(t, other[n]) for n, t in model.state_dict().items())
        x = activations(2, K)
        check(
            model.attention(x)[1],
            oracle.linear(
                x, spec("q4_k", other["attention.b.weight"], K), other["attention.b.bias"]
            ),
        )
        model.load_state_dict(want)


def test_a_wrong_state_dict_is_refused_as_ever() -> None:
    model = fused_model()
    state = dict(model.state_dict())
    state["attention.b.weight"] = torch.zeros(16, 3, dtype=torch.uint8)
    del state["attention.c.bias"]
    with pytest.raises(
        RuntimeError, match=r"attention.b.weight must be uint8 \[16, 144\]"
    ) as error:
        model.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "attention.c.bias"' in str(error.value)


def test_moves_copies_and_pickles_stay_fused() -> None:
    model, x = fused_model(), activations(2, K)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), y)
        of_all = other.attention.merged_a_b_c
        assert other.attention.b.merged is of_all is not model.attention.merged_a_b_c
        assert type(unfuse_(other).mlp) is Gated and torch.equal(other(x), y)
    model.half()
    assert model.attention.a.bias.dtype == torch.float16 == model.mlp.three.bias.dtype
    assert torch.equal(model.attention.a.weight, Model().attention.a.weight)
    meta = copy.deepcopy(model).to("meta")
    assert meta.attention.c.weight.is_meta and meta.mlp.one.weight.is_meta
    assert unfuse_(meta).attention.a.weight.is_meta


def test_setting_or_packing_parts_is_refused() -> None:
    model = fused_model()
    with pytest.raises(ValueError, match="weight belongs to a fused layer.*unfuse_"):
        model.attention.a.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(ValueError, match="merged layers; call unfuse_"):
        quantize_(model, "q4_0", progress=False)


def test_shared_and_trained_layers_stay() -> None:
    module = Attention(bias=True)
    model = nn.ModuleDict({"attention": module, "again": nn.ModuleList([module.a])})
    module.b.bias.requires_grad_()
    merged(module, model)
    assert all(type(m) is QuantLinear for m in (module.a, module.b, module.c))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="mlp_form: 'both'; allowed: None, 'swiglu', 'swiglu_li"):
        fuse_(Model(), "both")
    with pytest.raises(ValueError, match=r"attention.a.weight is on the meta device"):
        fuse_(Model().to("meta"))


# ---- models of transformers


@pytest.mark.filterwarnings("ignore:left dense", "ignore:K is not a multiple")  # of T5
@pytest.mark.parametrize("kind", ["phi", "bert", "t5"])
def test_models_of_which_a_part_is_fused(kind: str) -> None:
    """An MLP without a gate beside merged layers; encoders, of which nothing is."""
    model = quantize_(hf_models.random_model(kind), "q8_0", progress=False)
    want = hf_models.logits(model)
    assert near(hf_models.logits(fuse_(model, "swiglu")), want)
    assert any(isinstance(m, MergedLinear) for m in model.modules()) == (kind == "phi")


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

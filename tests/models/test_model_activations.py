"""activations_: which calls of our ops round their input, and that the setting is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import random_model
from layer_models import FUSED, are_fused, ids, logits, pair, small
from spoiled_folders import quant, stored
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from torch_metalmm import (
    MetalMMConfig,
    QuantLinear,
    activations_,
    fuse_,
    load_packed,
    quantize_,
    save_packed,
    unfuse_,
)

PRODUCTS = ("linear", "norm_linear", "swiglu", "swiglu_linear")


class Kinds(TorchDispatchMode):
    """What the calls of our products have for activations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "metalmm":
            name = op._schema.name.split("::")[1]
            assert name not in ("gemm", "gemv")  # which do not round
            if name in PRODUCTS:
                self.seen.append((kwargs or {}).get("activations"))
        return op(*args, **(kwargs or {}))


def kinds(model: Any, given: Tensor | None = None) -> list[Any]:
    with torch.no_grad(), Kinds() as mode:
        model(ids(1, 5) if given is None else given)
    return mode.seen


def settings(model: nn.Module) -> dict[str, str | None]:
    return {n: m.activations for n, m in model.named_modules() if isinstance(m, QuantLinear)}


ROUNDED = [("swiglu", "int8"), ("swiglu_linear", "int8"), ("swiglu_linear", "int16")]
# Branches that are scaled before they are added, norms after them, and both.
EACH = ("granite", "olmo2", "glm4")


@pytest.mark.parametrize(
    ("kind", "form", "rounding"),
    [(kind, *ROUNDED[i % 3]) for i, kind in enumerate(FUSED) if kind not in EACH]
    + [(kind, *rounded) for kind in EACH for rounded in ROUNDED],
)
def test_every_product_rounds(kind: str, form: str, rounding: str) -> None:
    """Plain and fused, one row and several; fused as far from exact as plain, and as near to it."""
    model, _ = pair(kind)
    exact = logits(model)
    plain = activations_(copy.deepcopy(model), rounding)
    assert set(settings(plain).values()) == {rounding}
    error = (logits(plain) - exact).norm()
    assert error > 0
    for fused in (
        fuse_(copy.deepcopy(plain), form),
        activations_(fuse_(copy.deepcopy(model), form), rounding),
    ):
        assert all(are_fused(fused))
        for given in (ids(1, 5), ids(1, 1)):
            seen = kinds(fused, given)
            assert seen and set(seen) == {rounding}
        assert (logits(fused) - exact).norm() > 0
        assert (logits(fused) - logits(plain)).norm() <= 2 * error
        assert set(settings(unfuse_(fused)).values()) == {rounding}
        assert torch.equal(logits(fused), logits(plain))
    assert set(kinds(activations_(plain, None))) == {None}
    assert torch.equal(logits(plain), exact)


def test_a_layer_of_two_kinds() -> None:
    """A fused layer computes as its class does where its parts differ."""
    model = fuse_(small("llama"), "swiglu")
    activations_(model.model.layers[0].mlp, "int8")
    seen = kinds(model)
    assert 0 < seen.count("int8") < len(seen)
    merged = fuse_(activations_(small("llama"), "int8"), "swiglu")
    assert all(are_fused(merged))
    parts = small("llama")
    activations_(nn.ModuleList([parts.model.layers[0].self_attn.q_proj]), "int8")
    before = settings(parts)
    fuse_(parts)
    assert settings(parts) == before and list(before.values()).count("int8") == 1
    assert "int8" in kinds(parts)


def test_a_layer_packed_again_keeps_it() -> None:
    layer = QuantLinear.from_linear(nn.Linear(64, 32), "q8_0")
    activations_(layer, "int8")
    assert QuantLinear.from_linear(layer, "q4_0").activations == "int8"
    assert QuantLinear.from_linear(layer, "q8_0").activations == "int8"
    assert QuantLinear.from_linear(layer, "f16").activations is None


def test_other_devices_read_exactly() -> None:
    """The op refuses int8 there; a layer does not ask for it."""
    layer = activations_(QuantLinear.from_linear(nn.Linear(64, 32), "q8_0"), "int8")
    x = torch.randn(2, 64)
    y = layer(x)
    with torch.no_grad(), Kinds() as mode:
        layer(x)
        layer.to("meta")(x.to("meta"))
    assert mode.seen == ["int8", None] and y.shape == (2, 32)


def test_gradients_pass_straight_through() -> None:
    layer = QuantLinear.from_linear(nn.Linear(64, 32), "q8_0")
    x = torch.randn(3, 64, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x).square().sum() * 0 + layer(x).sum(), x)
    (got,) = torch.autograd.grad(activations_(layer, "int8")(x).sum(), x)
    assert torch.equal(got, want)


def test_compiled() -> None:
    model = fuse_(activations_(small("llama", num_hidden_layers=1), "int8"), "swiglu")
    want = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled), want)
    activations_(model, None)
    assert not torch.equal(logits(compiled), want)


@pytest.mark.parametrize("how", ["save_packed", "save_pretrained"])
def test_files_of_a_fused_model_keep_it(tmp_path: Path, how: str) -> None:
    model = fuse_(activations_(quantize_(random_model("llama"), "q8_0", progress=False), "int8"))
    if how == "save_packed":
        save_packed(model, None, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    assert stored(tmp_path)["activations"] == "int8"
    for loaded in (load_packed(tmp_path)[0], AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert set(settings(loaded).values()) == {"int8"} and set(kinds(loaded)) == {"int8"}
        activations_(loaded, None).save_pretrained(tmp_path / "again")
        assert "activations" not in stored(tmp_path / "again")


def test_files_keep_layers_that_differ(tmp_path: Path) -> None:
    model = quantize_(random_model("llama"), {"lm_head": "f16", "*": "q8_0"}, progress=False)
    activations_(model.model.layers[0].mlp, "int8")
    activations_(model.model.layers[1].mlp, "int16")
    want = settings(model)
    assert set(want.values()) == {"int8", "int16", None}
    model.save_pretrained(tmp_path)
    assert settings(AutoModelForCausalLM.from_pretrained(tmp_path)) == want


def test_from_pretrained_sets_it(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    config = MetalMMConfig("q8_0", {"lm_head": "f16"}, activations="int8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    found = settings(model)
    assert found.pop("lm_head") is None and set(found.values()) == {"int8"}


ERRORS: dict[str, tuple[Any, str]] = {
    "unknown": ("int4", "activations: 'int4'; allowed: None, 'int8', 'int16'"),
    "a number": (8, "activations: 8; allowed: None, 'int8', 'int16'"),
    "a list": (["int8"], r"activations: \['int8'\]; allowed: None, 'int8', 'int16'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_refused(case: str) -> None:
    kind, message = ERRORS[case]
    model = small("llama")
    with pytest.raises(ValueError, match=message):
        activations_(model, kind)
    with pytest.raises(ValueError, match=message):
        MetalMMConfig("q8_0", activations=kind)
    assert set(settings(model).values()) == {None}


def test_models_that_cannot() -> None:
    for model in (nn.Linear(4, 4), quantize_(nn.Sequential(nn.Linear(4, 4)), "f16")):
        with pytest.raises(ValueError, match="activations: 'int8'; the model has no packed linear"):
            activations_(model, "int8")
        assert activations_(model, None) is model
    with pytest.raises(ValueError, match=r"activations\['lm_head'\]: 'fp8'; allowed"):
        MetalMMConfig("q8_0", activations={"lm_head": "fp8"})


def test_a_stored_name_that_is_no_layer(tmp_path: Path) -> None:
    quantize_(random_model("llama"), "q8_0", progress=False).save_pretrained(tmp_path)
    quant(activations={"model.norm": "int8"})(tmp_path)
    with pytest.raises(ValueError, match=r"model\.norm in activations is no packed layer"):
        AutoModelForCausalLM.from_pretrained(tmp_path)

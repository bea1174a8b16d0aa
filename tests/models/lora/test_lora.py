"""LoRA by PEFT on packed layers: the plug, outputs, gradients, DoRA, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from backends import Backend
from forked import Forked, forked
from inputs import activations
from lora_cases import FORMATS, QUIET, SCALING, Block, adapted, delta, lora, randomize
from oracle import Value, check
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_llama, token_ids
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION

from torch_metalmm import QuantLinear, formats, quantize_

pytestmark = QUIET


# ---- the plug


FIRST = {
    "peft": "import peft",
    "this package": "import sys, torch_metalmm; torch_metalmm.merge_errors\n"
    "assert not {'peft', 'transformers'} & set(sys.modules)\n"
    "import torch_metalmm.models.lora.layers",
}


@pytest.fixture(scope="module")
def python() -> Iterator[Forked]:
    """python(said, script): in a process of its own, which has imported torch alone."""
    script = "import torch\ndef run(script):\n exec(script, {})\n"
    with forked(script, {}, "-W", "error::UserWarning") as calls:
        yield calls


@pytest.mark.parametrize("first", FIRST)
def test_every_order_of_imports_plugs_in(first: str, tmp_path: Path, python: Forked) -> None:
    """In this process torch_metalmm is imported first, which does not import peft; then peft."""
    script = (
        f"{FIRST[first]}\nimport torch_metalmm, peft\n"
        "kind = peft.PEFT_TYPE_TO_TUNER_MAPPING['LORA']\n"
        "assert kind.__name__ == 'PackedLoraModel', kind\n"
        "assert issubclass(kind, peft.LoraModel)\n"
    )
    said = tmp_path / "said"
    assert python(said, script) == 0, said.read_text()


def test_every_way_of_adding_lora_finds_the_packed_layers() -> None:
    def kinds(model: nn.Module) -> list[str]:
        return [type(m).__name__ for m in model.modules() if hasattr(m, "base_layer")]

    both = ["PackedLoraEmbedding", "PackedLoraLinear"]
    assert kinds(get_peft_model(Block("q8_0"), lora("table", "up"))) == both
    assert kinds(peft.inject_adapter_in_model(lora("table", "up"), Block("q8_0"))) == both
    llama = quantize_(tiny_llama(), "q8_0", progress=False)
    if Version(peft.__version__) >= Version(MIN_PEFT_VERSION):
        llama.add_adapter(lora("q_proj"))
        assert kinds(llama) == ["PackedLoraLinear"] * 2
    else:  # transformers 5.24 was released before the PEFT that it asks for
        with pytest.raises(ValueError, match="version of PEFT"):
            llama.add_adapter(lora("q_proj"))
    chosen = get_peft_model(
        quantize_(tiny_llama(), "q8_0", progress=False),
        LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    assert kinds(chosen) == ["PackedLoraLinear"] * 14  # all but the head
    dense = get_peft_model(nn.Sequential(nn.Linear(8, 8)), lora("0"))
    assert kinds(dense) == ["Linear"]


# ---- outputs and gradients


def exact_pass(model: Any, x: Tensor) -> tuple[Value, Value, Value]:
    """(u, h, y) of Block with adapters on both layers: u before SiLU, h after it."""

    def layer(module: Any, x: Value) -> Value:
        packed = module.base_layer
        w = formats.get(packed.format).dequantize(packed.weight, packed.in_features)
        low = x.dot(module.lora_A["default"].weight.detach())
        return x.dot(w) + low.dot(module.lora_B["default"].weight.detach()) * SCALING

    u = layer(model.up, Value.of(x))
    h = u.silu()
    return u, h, layer(model.down, h)


@pytest.mark.parametrize("format", FORMATS)
def test_output_and_gradients_are_those_of_the_decoded_weights(
    format: str, backend: Backend
) -> None:
    """Against float64 with W + s B A, within the f32 roundings of the chain."""
    x, g = activations(9, 256), activations(9, 256, seed="g")
    there = adapted(format, "up", "down").base_model.model.to(backend.device)
    y = there(backend.put(x))
    y.backward(backend.put(g))
    model = adapted(format, "up", "down").base_model.model
    for a, b in zip(model.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b.cpu())
        a.grad = None if b.grad is None else b.grad.cpu()
    u, h, want = exact_pass(model, x)
    check(y, want, f"{format} y")
    (a1, b1), (a2, b2) = (
        (m.lora_A["default"].weight, m.lora_B["default"].weight) for m in (model.up, model.down)
    )
    grad = Value.of(g) * SCALING
    w2 = formats.get(format).dequantize(model.down.base_layer.weight, 512)
    dh = Value.of(g).dot(w2.T) + grad.dot(b2.detach().T).dot(a2.detach().T)
    du = dh * u.silu_slope()
    check(b2.grad, grad.T.matmul(h.dot(a2.detach())), f"{format} dB2")
    check(a2.grad, grad.dot(b2.detach().T).T.matmul(h), f"{format} dA2")
    check(b1.grad, (du * SCALING).T.matmul(Value.of(x).dot(a1.detach())), f"{format} dB1")
    check(a1.grad, (du * SCALING).dot(b1.detach().T).T.matmul(Value.of(x)), f"{format} dA1")
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)


def test_kbit_preparation_and_checkpointing_leave_the_bytes_and_the_gradients() -> None:
    model = quantize_(tiny_llama().to(torch.bfloat16), "q4_k", progress=False)
    packed = {n: p for n, p in model.named_parameters() if p.dtype == torch.uint8}
    before = {n: p.clone() for n, p in packed.items()}
    model = peft.prepare_model_for_kbit_training(model)
    assert {p.dtype for p in model.parameters()} == {torch.uint8, torch.float32}
    for name, p in packed.items():
        assert model.get_parameter(name) is p and torch.equal(p, before[name])
    model = get_peft_model(model, lora("q_proj", "down_proj")).train()
    randomize(model)
    ids, grads = token_ids(2, 9), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(grads[0]) == 8
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*grads, strict=True))


# ---- DoRA


def test_dora_starts_as_the_base_and_scales_rows() -> None:
    """y = m / |W + s B A| (W + s B A) x: with B = 0 and m doubled, twice the base, bit for bit."""
    x, base = activations(4, 256), Block("q4_k")
    model = get_peft_model(base, lora("up", "table", use_dora=True)).base_model.model
    packed = model.up.base_layer.weight
    w = formats.get("q4_k").dequantize(packed, 256)
    assert torch.equal(model.up(x), model.up.base_layer(x))
    ids = torch.tensor([1, 5])
    assert torch.equal(model.table(ids), model.table.base_layer(ids))
    with torch.no_grad():
        model.up.lora_magnitude_vector["default"].weight *= 2
    y = model.up(x)
    assert torch.equal(y, 2 * model.up.base_layer(x))
    y.sum().backward()
    assert model.up.lora_magnitude_vector["default"].weight.grad.abs().max() > 0
    model.up.merge()
    assert torch.equal(model.up.base_layer.weight, formats.get("q4_k").quantize(2 * w))
    model.up.unmerge()
    assert torch.equal(model.up.base_layer.weight, packed) and torch.equal(model.up(x), y)


def test_dora_merges_as_on_the_dense_layer() -> None:
    """Two adapters merged in turn, against PEFT's own merge of the decoded weight."""
    packed, dense = Block("f32"), Block("f32")
    dense.up = nn.Linear(256, 512, bias=False)
    dense.up.weight.data = packed.up.dequantize()
    models = [get_peft_model(m, lora("up", use_dora=True)) for m in (packed, dense)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, that one was merged already
        for model in models:
            model.add_adapter("other", lora("up", use_dora=True))
            for seed, name in enumerate(("default", "other")):
                randomize(model, name, seed=seed)
            model.merge_adapter(["default", "other"])
    assert torch.equal(
        *(
            m.dequantize() if isinstance(m, QuantLinear) else m.weight
            for m in (model.base_model.model.up.base_layer for model in models)
        )
    )


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_lora_weights": "pissa"}, "'pissa' needs the dense weight.*format=q8_0.*'gaussian'"),
        ({"init_lora_weights": "olora"}, "'olora' needs the dense weight"),
        ({"init_lora_weights": "loftq"}, "'loftq' needs the dense weight"),
        ({"init_lora_weights": "mica"}, "'mica' needs the dense weight"),
        (
            {"kasa_config": peft.tuners.lora.KasaConfig()},
            "kasa_config: must be None, it rewrites the weight",
        ),
    ],
)
def test_variants_that_need_the_dense_weight_are_refused(
    options: dict[str, Any], message: str
) -> None:
    config = lora("up")
    for name, value in options.items():  # PEFT's constructor asks LoftQ for scipy
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        get_peft_model(Block("q8_0"), config)


def test_adapters_on_the_packed_tensor_itself_are_refused() -> None:
    with pytest.raises(ValueError, match="target_parameters: weight of QuantLinear.*is packed"):
        get_peft_model(Block("q8_0"), lora(target_parameters=["up.weight"]))


def test_a_broken_adapter_is_not_merged() -> None:
    for safe in (False, True):
        model = adapted("q8_0", "up")
        layer = model.base_model.model.up
        before = layer.base_layer.weight.clone()
        layer.lora_B["default"].weight.data[3, 1] = torch.nan
        with pytest.raises(ValueError, match="NaN"):
            model.merge_adapter(safe_merge=safe)
        assert torch.equal(layer.base_layer.weight, before) and layer.merged_adapters == []
        assert isinstance(layer.base_layer, QuantLinear)


def test_fan_in_fan_out_is_corrected() -> None:
    """Set for GPT-2's Conv1D, whose packed stand-in stores [out, in] as every packed layer."""
    with pytest.warns(UserWarning, match=r"stores \[out, in\]"):
        model = adapted("q8_0", "up", fan_in_fan_out=True)
    layer = model.base_model.model.up
    assert not model.peft_config["default"].fan_in_fan_out
    assert torch.equal(layer.get_delta_weight("default"), delta(layer))

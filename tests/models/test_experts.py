"""Mixtures of experts: stacked experts stay packed, whatever their class makes of them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from expert_models import (
    EXPERTS,
    FFN,
    IDS,
    MODELS,
    H,
    check_equals,
    decoded,
    expert_model,
    greedy,
    logits,
)
from spoiled_folders import quant
from torch import Tensor, nn

from torch_metalmm import (
    MetalMMConfig,
    QuantExperts,
    activations_,
    load_packed,
    quantize_,
    save_packed,
)
from torch_metalmm.models.structure import structure_of

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:K is not a multiple"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # PEFT
    pytest.mark.usefixtures("quiet_transformers"),
]


def experts_of(model: nn.Module) -> dict[str, QuantExperts]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantExperts)}


def same_state(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)


def load(kind: Any, folder: Path, **options: Any) -> Any:
    model = type(kind) if isinstance(kind, nn.Module) else kind
    return model.from_pretrained(folder, experts_implementation="eager", **options)


@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_model_equals_its_decoded_one(kind: str) -> None:
    dense = expert_model(kind)
    packed = quantize_(copy.deepcopy(dense), "q8_0", progress=False)
    stacked = {n.rpartition(".")[0] for n, p in dense.named_parameters() if p.dim() == 3}
    assert experts_of(packed).keys() == stacked != set()
    assert packed.num_parameters() == dense.num_parameters()
    assert packed.state_dict().keys() == dense.state_dict().keys()
    reference = decoded(dense, packed)
    check_equals(packed, reference)
    assert torch.equal(greedy(packed), greedy(reference))
    check_equals(packed, reference, IDS[:1, :1])  # few rows: another kernel


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss", "Llama4Text", "DeepseekV3"])
def test_packing_while_loading_and_saves(kind: str, tmp_path: Path) -> None:
    """from_pretrained merges the experts of a checkpoint, and packs them as quantize_ does."""
    dense = expert_model(kind)
    dense.save_pretrained(tmp_path / "dense")
    packed = quantize_(copy.deepcopy(dense), "q8_0", progress=False)
    loaded = load(dense, tmp_path / "dense", quantization_config=MetalMMConfig("q8_0"))
    assert same_state(loaded, packed)
    loaded.save_pretrained(tmp_path / "packed")
    again = load(dense, tmp_path / "packed")
    assert same_state(again, packed) and torch.equal(logits(again), logits(packed))
    save_packed(packed, None, tmp_path / "folder")
    model, _ = load_packed(tmp_path / "folder")
    assert same_state(model, packed)
    back = model.dequantize()
    assert not experts_of(back)
    assert same_state(back, decoded(dense, packed))


def test_formats_of_stacks() -> None:
    """A stack has the format of the first pattern for it or its module; 64 values take no q4_k."""
    model = quantize_(
        expert_model(), {"*.0.mlp.experts.down_proj": "q5_0", "*.0.mlp.experts": "q4_0"}
    )
    experts = experts_of(model)
    assert [m.formats for m in experts.values()] == [{"gate_up_proj": "q4_0", "down_proj": "q5_0"}]
    with pytest.warns(UserWarning, match=r"q4_k -> q5_0: .*experts.gate_up_proj \(2\)"):
        model = quantize_(expert_model(), {"*.experts": "q4_k"})
    assert model.model.layers[0].mlp.experts.formats == dict.fromkeys(
        ("gate_up_proj", "down_proj"), "q5_0"
    )


def test_one_stack_alone(tmp_path: Path) -> None:
    """The other is rows of its own dtype."""
    dense = expert_model("GptOss").to(torch.bfloat16)
    model = quantize_(copy.deepcopy(dense), {"*.experts.down_proj": "q8_0"}, progress=False)
    for module in experts_of(model).values():
        assert module.formats == {"gate_up_proj": "bf16", "down_proj": "q8_0"}
    first = model.model.layers[0].mlp.experts
    assert torch.equal(
        first.dequantize("gate_up_proj", torch.bfloat16).transpose(1, 2),
        dense.model.layers[0].mlp.experts.gate_up_proj,
    )
    save_packed(model, None, tmp_path)
    assert same_state(load_packed(tmp_path)[0], model)


def test_who_is_not_asked_for(tmp_path: Path) -> None:
    model = quantize_(expert_model(), "q8_0", lambda name, module: "experts" not in name)
    assert not experts_of(model)
    seen: list[tuple[str, type]] = []

    def spec(name: str, module: nn.Module) -> str | None:
        seen.append((name, type(module)))
        return None

    quantize_(expert_model(), spec)
    kind = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
    assert ("model.layers.1.mlp.experts.down_proj", kind) in seen
    expert_model().save_pretrained(tmp_path)
    for skip in ("experts", "gate_up_proj"):
        config = MetalMMConfig("q8_0", skip=[skip])
        loaded = load(transformers.Qwen3MoeForCausalLM, tmp_path, quantization_config=config)
        formats = [m.formats for m in experts_of(loaded).values()]
        mixed = {"gate_up_proj": "f32", "down_proj": "q8_0"}
        assert formats == ([] if skip == "experts" else [mixed, mixed])


def test_dense_experts_are_freed_without_the_collector() -> None:
    """Once their packed ones exist nothing holds them, not even a cycle."""
    model = expert_model()
    dense = [weakref.ref(p) for p in model.parameters() if p.dim() == 3]
    gc.collect()
    gc.disable()
    try:
        quantize_(model, "q8_0", progress=False)
        assert len(dense) == 4 and [ref() for ref in dense] == [None] * 4
    finally:
        gc.enable()


def test_sorted_experts_under_autocast() -> None:
    """Their products come in autocast's dtype, and each row goes where it belongs."""
    model = quantize_(expert_model("Llama4Text"), "q8_0", progress=False)
    experts = next(m for m in experts_of(model).values())
    x = torch.zeros(EXPERTS, 3, H)
    for token in range(3):
        x[2 * token, token] = torch.randn(H, generator=torch.Generator().manual_seed(token))
    x = x.flatten(0, 1)
    want = experts(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want) and bool(want.any())


def test_packed_again() -> None:
    dense = expert_model()
    model = quantize_(copy.deepcopy(dense), "q8_0", progress=False)
    want = quantize_(decoded(dense, model), "q4_0", progress=False)
    assert same_state(quantize_(model, "q4_0", progress=False), want)


STACK = "model.layers.1.mlp.experts.down_proj"
LEFT = r"left dense, (\d+)% of the weights: stacked experts that compute what no packed layer does"


def _tanh(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate.tanh() * up


def _swapped(self: Any, gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("gate", [_tanh, _swapped])
def test_experts_of_another_gate_stay_dense(
    gate: Callable[..., Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tensors look like, the class is run."""
    kind = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts
    monkeypatch.setattr(kind, "_apply_gate", gate)
    config = transformers.DeepseekV4Config(
        hidden_size=H, intermediate_size=FFN, num_local_experts=EXPERTS
    )
    config._experts_implementation = "eager"
    model = nn.Sequential(kind(config), nn.Linear(H, H))
    nn.init.normal_(model[0].gate_up_proj)
    nn.init.normal_(model[0].down_proj)
    with pytest.warns(UserWarning, match=LEFT + r": 0.gate_up_proj, 0.down_proj"):
        quantize_(model, "q8_0")
    assert type(model[0]) is kind


def test_state_dicts_and_copies() -> None:
    model = quantize_(expert_model(), "q8_0", progress=False)
    other = quantize_(expert_model(), "q4_0", progress=False)
    with pytest.raises(
        RuntimeError, match=r"gate_up_proj is stored as q8_0, this layer holds q4_0"
    ):
        other.load_state_dict(model.state_dict())
    state = model.state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    state[name] = state[name][:-1]
    with pytest.raises(RuntimeError, match=rf"{name} must be uint8 \[{EXPERTS}, {H}, 68\] \(q8_0"):
        model.load_state_dict(state)
    assert same_state(copy.deepcopy(model), model)
    experts = quantize_(expert_model("GptOss"), "q8_0", progress=False).model.layers[0].mlp.experts
    half = copy.deepcopy(experts).half()
    assert half.down_proj.dtype == torch.uint8 and half.down_proj_bias.dtype == torch.float16
    args = torch.randn(3, H), torch.tensor([[0, 1], [2, 2], [5, 3]]), torch.rand(3, 2)
    near = half(args[0].half(), args[1], args[2].half()).float()
    # Each of the four products, the sum and the inputs is rounded to f16, of values of its size.
    want = experts(*args)
    assert (near - want).abs().max() <= 16 * 2.0**-11 * want.abs().max()


def test_the_implementation_of_that_name() -> None:
    model = expert_model()
    model.set_experts_implementation("metalmm")
    with pytest.raises(
        ValueError, match=r"those of Qwen3MoeExperts are dense: pack them with quan"
    ):
        logits(model)
    packed = quantize_(expert_model(), "q8_0", progress=False)
    want = logits(packed)
    packed.set_experts_implementation("metalmm")
    assert torch.equal(logits(packed), want)


def test_activations_of_experts(tmp_path: Path) -> None:
    model = activations_(quantize_(expert_model(), "q8_0", progress=False), "int8")
    assert {m.activations for m in experts_of(model).values()} == {"int8"}
    exact = copy.deepcopy(model)
    for module in experts_of(exact).values():
        module._activations = None
    assert not torch.equal(logits(model), logits(exact))
    save_packed(model, None, tmp_path)
    again, _ = load_packed(tmp_path)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"activations": {STACK: "int8"}}, f"{STACK} in activations is no packed layer"),
        ({"input_order": [STACK]}, f"{STACK} in input_order is not packed"),
    ],
)
def test_configs_that_give_a_stack_what_a_layer_has(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    model = quantize_(expert_model(), "q8_0", progress=False)
    model.save_pretrained(tmp_path)
    quant(**entry)(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(model, tmp_path)


class InOrder(nn.Module):
    """Experts that get the tokens of each, as Llama 4's do; with biases rows of 0 give others."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, H, 2 * FFN))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, FFN, H))
        if biased:
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * FFN))
            self.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, H))

    def forward(self, x: Tensor) -> Tensor:
        p = self._parameters
        x = x.view(len(self.down_proj), -1, x.shape[-1])
        for name in ("gate_up_proj", "down_proj"):
            x = x @ p[name]
            if f"{name}_bias" in p:
                x = x + p[f"{name}_bias"].unsqueeze(1)
            if name == "gate_up_proj":
                gate, up = x.chunk(2, -1)
                x = nn.functional.silu(gate) * up
        return x.flatten(0, 1)


def test_experts_in_order_have_no_biases() -> None:
    plain = structure_of(InOrder(False))
    assert plain is not None and plain.in_order
    assert structure_of(InOrder(True)) is None


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ({"down_proj": "q8_0"}, r"formats: stacks \('down_proj',\); allowed: \('gate_up_proj'"),
        ({"gate_up_proj": "q8_0", "down_proj": "q9"}, "q9"),
        ({"gate_up_proj": "q4_k", "down_proj": "q8_0"}, "K = 128 is not a multiple of the block"),
    ],
)
def test_bad_formats(formats: dict[str, str], message: str) -> None:
    from torch_metalmm.nn.gate import Gate

    with pytest.raises(ValueError, match=message):
        QuantExperts(EXPERTS, H, FFN, formats, Gate())


def test_bad_bytes() -> None:
    model = quantize_(expert_model(), "q8_0", progress=False)
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(ValueError, match=rf"down_proj must be uint8 \[{EXPERTS}, {H}, 36\] \(q4_0"):
        experts.put("down_proj", experts.down_proj, "q4_0")

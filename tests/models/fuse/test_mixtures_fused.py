"""Mixtures of experts in fused layers: where the shared expert lies, and when it is stacked."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import random_model
from layer_models import near
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bench.models.families import family, fused_family
from bench.models.op_counts import Calls
from torch_metalmm import activations_, fuse_, load_gguf, unfuse_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.fuse.mixtures import mixture_of
from torch_metalmm.models.fuse.observe import Call
from torch_metalmm.nn.experts import QuantExperts
from torch_metalmm.nn.mixture import Mixture

pytestmark = pytest.mark.filterwarnings("ignore")


def mixtures(model: Any) -> list[Mixture]:
    layers = (fused_layer(layer) for layer in model.get_decoder().layers)
    cores = [b.core for f in layers if f is not None for b in f.recipe.branches]
    return [core for core in cores if isinstance(core, Mixture)]


def logits(model: Any, length: int) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(length)[None] + 5, use_cache=False).logits
    return found


def assert_near(a: Tensor, b: Tensor) -> None:
    assert near(a, b, 128, 28)  # stages as in test_layers_recurrent.py


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "glm4_moe"])
def test_the_shared_expert_behind_the_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and names stay; few rows read one stack, many rows and copies two weights.

    Of GLM-4's the shared expert has no gate: it counts whole.
    """
    model = family(kind)
    fused = fused_family(model)
    want = model.state_dict()
    assert [*fused.state_dict()] == [*want]
    assert all(torch.equal(t, want[n]) for n, t in fused.state_dict().items())
    found = mixtures(fused)
    assert len(found) == 2
    for mixture in found:
        stacks: Any = mixture.stacks()
        assert {n: len(t) for n, t in stacks.items()} == dict.fromkeys(mixture.experts.formats, 9)
        own = stacks["gate_up_proj"][:8]
        assert own.data_ptr() == mixture.experts.gate_up_proj.data_ptr()
    took: list[bool] = []
    mixed = QuantExperts.mixed
    monkeypatch.setattr(
        QuantExperts, "mixed", lambda *a: (took.append(a[5] is not None), mixed(*a))[1]
    )
    for length in (1, 16, 17):
        took.clear()
        assert_near(logits(fused, length), logits(model, length))
        assert took == [length <= 16] * 2
    copied = copy.deepcopy(fused)
    assert all(m.stacks() is None for m in mixtures(copied))
    assert_near(logits(copied, 3), logits(model, 3))
    with torch.no_grad():  # the stack is the weights' own memory
        for m in (model, fused):
            mlp = m.get_decoder().layers[0].mlp
            (
                mlp.shared_experts if kind == "glm4_moe" else mlp.shared_expert
            ).down_proj.weight.zero_()
    assert_near(logits(fused, 2), logits(model, 2))
    fused.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[n], t) for n, t in fused.state_dict().items() if n in saved)
    assert {n for n in want if "experts" in n} <= saved.keys()
    assert_near(logits(unfuse_(fused), 3), logits(model, 3))


def test_a_shared_expert_of_another_size_stays_apart() -> None:
    """route says what it counts for one row; torch does for several, or where down has a bias."""
    for kind, options, count in (
        ("qwen2_moe", {}, [1, 1]),
        ("qwen3_next", {"shared_expert_intermediate_size": 128}, PRODUCTS),
        ("glm4_moe", {"n_shared_experts": 2}, [2, 2]),
    ):
        model = family(kind, **options)
        fused = fused_family(model)
        found = mixtures(fused)
        assert len(found) == 2 and all(m.stacks() is None for m in found)
        assert products(fused) == count
        for length in (1, 3, 17):
            assert_near(logits(fused, length), logits(model, length))
        if kind == "glm4_moe":
            continue
        for m in (model, fused):
            down = m.model.layers[0].mlp.shared_expert.down_proj
            down.bias = torch.nn.Parameter(torch.ones(down.out_features), requires_grad=False)
        assert products(fused) == [count[0] + 2, count[1]]
        assert_near(logits(fused, 1), logits(model, 1))


def test_a_result_of_another_shape_is_of_another_mixture() -> None:
    """Even where the values are the same."""
    mlp = fused_family(family("qwen3_next")).model.layers[0].mlp
    x = torch.randn(1, 3, mlp.gate.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = mlp(x)
    assert mixture_of(Call(mlp, (x,), {}, out), x) is not None
    assert mixture_of(Call(mlp, (x,), {}, out[0]), x) is None


def test_more_choices_than_route_has_beside_a_shared_expert() -> None:
    options = {"num_experts": 40, "num_experts_per_tok": 32}
    model = family("qwen3_next", **options)
    fused = fused_family(model)
    assert mixtures(fused) and all(m.stacks() is None for m in mixtures(fused))
    assert_near(logits(fused, 3), logits(model, 3))


def test_what_changes_after_fuse_() -> None:
    """A bias of the shared expert counts, and weights that are replaced are freed."""
    model = family("qwen3_next")
    fused = fused_family(model)
    logits(fused, 1)
    old = StorageWeakRef(mixtures(fused)[0].experts._parameters["down_proj"].untyped_storage())
    fused.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    gc.collect()
    assert old.expired()
    assert_near(logits(fused, 3), logits(model, 3))
    biased = fused_family(model)
    for m in (model, biased):
        down = m.get_decoder().layers[0].mlp.shared_expert.down_proj
        down.bias = torch.nn.Parameter(torch.ones(down.out_features), requires_grad=False)
    assert_near(logits(biased, 3), logits(model, 3))


# Plain products of a token's layers: the output of linear attention, and none.
PRODUCTS = [1, 0]


def gated(kind: str = "qwen3_5_moe_text") -> Any:
    """A model whose shared gates are not packed, as of GGUF files and recipes."""
    model = family(kind)
    for layer in model.model.layers:
        packed = layer.mlp.shared_expert_gate
        gate = nn.Linear(packed.in_features, 1, bias=False)
        gate.weight = nn.Parameter(packed.dequantize(), requires_grad=False)
        layer.mlp.shared_expert_gate = gate
    return model


def products(model: Any) -> list[int]:
    """How many plain products each layer calls for a token."""
    calls = Calls()
    calls.watch(model.get_decoder().layers)
    with calls:
        logits(model, 1)
    calls.unwatch()
    return [ours.count("linear") for ours, _ in calls.of_layers]


def lies_behind(table: Tensor, row: Tensor) -> bool:
    return row.data_ptr() == table.data_ptr() + table.nbytes


def test_route_computes_the_product_of_a_shared_gate(tmp_path: Path) -> None:
    """It lies behind the router's rows if it has their dtype, which nobody else notices."""
    model = gated()
    fused, want = fused_family(model), model.state_dict()
    mlp = fused.model.layers[0].mlp
    assert lies_behind(mlp.gate.weight, mlp.shared_expert_gate.weight)
    assert products(fused) == PRODUCTS
    for length in (1, 16, 17):
        assert_near(logits(fused, length), logits(model, length))
    state = fused.state_dict()
    assert [*state] == [*want] and all(torch.equal(t, want[n]) for n, t in state.items())
    fused.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[n], want[n]) for n in want if "gate.weight" in n)
    with torch.no_grad():
        for m in (model, fused):
            mlp = m.model.layers[0].mlp
            mlp.gate.weight.mul_(0.5)
            mlp.shared_expert_gate.weight.mul_(-3)
    assert_near(logits(fused, 3), logits(model, 3))
    assert products(fused) == PRODUCTS
    fused.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    assert_near(logits(fused, 3), logits(model, 3))
    assert_near(logits(unfuse_(fused), 3), logits(model, 3))


def test_a_shared_gate_unlike_the_router() -> None:
    """Packed: route reads both where they are. Rounded activations, and a bias, take a product."""
    model = family("qwen3_5_moe_text")
    fused = fused_family(model)
    mlp = fused.model.layers[0].mlp
    assert not lies_behind(mlp.gate.weight, mlp.shared_expert_gate.weight)
    assert products(fused) == PRODUCTS
    assert_near(logits(fused, 3), logits(model, 3))
    for m in (model, fused):
        gate = m.model.layers[0].mlp.shared_expert_gate
        gate.bias = nn.Parameter(torch.ones(1), requires_grad=False)
    assert products(fused) == [PRODUCTS[0] + 1, PRODUCTS[1]]
    assert_near(logits(fused, 3), logits(model, 3))
    activations_(fused, "int8")
    assert products(fused) == [n + 1 for n in PRODUCTS]


@pytest.mark.parametrize("trained", [(), ("gate",), ("shared_expert_gate",)])
def test_trained_gates(trained: tuple[str, ...]) -> None:
    """The gradient of a router or a gate alone is the class's own forward's."""
    model = gated()
    fused = fused_family(model)
    assert len(mixtures(fused)) == 2 and all(m.stacks() is not None for m in mixtures(fused))
    for length in (3, 40):
        assert_near(logits(fused, length), logits(model, length))
    grads: list[Tensor] = []
    for m in (model, fused):
        for parameter in m.parameters():
            parameter.requires_grad = False
        weights = [m.model.layers[0].mlp.get_submodule(name).weight for name in trained]
        for weight in weights:
            weight.requires_grad = True
        out = m(torch.arange(5)[None] + 5, use_cache=False).logits
        assert out.requires_grad == bool(trained)
        grads += torch.autograd.grad(out.square().sum(), weights) if trained else []
    if trained:
        assert grads[0].abs().max() > 0
        assert_near(*grads)


@pytest.mark.parametrize("architecture", ["qwen35moe", "qwen3next"])
def test_the_layers_of_gguf_files(architecture: str, tmp_path: Path) -> None:
    """The shared gate is not packed there, and Qwen3.5's recurrent outputs have an order."""
    model, _ = load_gguf(random_model(tmp_path / "m.gguf", architecture, kinds=("q8_0",)))
    ordered = model.model.layers[0].linear_attn.out_proj.input_order is not None
    assert ordered == (architecture == "qwen35moe")
    fuse_(model)
    found = [fused_layer(layer) for layer in model.model.layers]
    cores = [[type(b.core).__name__ for b in f.recipe.branches] for f in found if f is not None]
    assert cores == [["Delta", "Mixture"]] * 3 + [["Heads", "Mixture"]]

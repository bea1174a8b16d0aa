"""Fused decoder layers in use: where the layer's own forward computes, modules that are changed
later, copies, files, unfuse_."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from layer_models import are_fused, ids, layers, logits, near, padded, pair, small
from lora_cases import QUIET, lora, randomize
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torch_metalmm import _C, activations_, fuse_, unfuse_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.nn.fused import LinearPart
from torch_metalmm.nn.layer import FusedLayer
from torch_metalmm.testing import emulated, shader_library

pytestmark = QUIET


def both(kind: str = "llama") -> tuple[Any, Any]:
    """(fused, as it was)"""
    model, fused = copy.deepcopy(pair(kind))
    assert all(are_fused(fused))
    return fused, model


def agree(model: Any, plain: Any) -> bool:
    return near(logits(model), logits(plain))


def ours(model: Any, call: Callable[[Any], Any] = logits) -> list[int]:
    """The numbers of the layers that our ops compute."""
    compute, seen = FusedLayer.compute, list[Any]()

    def noting(self: FusedLayer, *args: Any) -> Tensor:
        seen.append(self.module)
        return compute(self, *args)

    with patch.object(FusedLayer, "compute", noting):
        call(model)
    return [layers(model).index(layer) for layer in seen]


# ---- hooks, other modules and other forwards


def hook(module: nn.Module, kind: str, seen: list[int]) -> Callable[[], None]:
    """Something is to be called with the module; how it is taken away."""
    if kind == "forward":
        module.forward, own = (lambda *a, **k: seen.append(1) or own(*a, **k)), module.forward
        return lambda: delattr(module, "forward")
    if kind == "global":
        register = nn.modules.module.register_module_forward_hook
    else:
        register = getattr(module, f"register_{kind}")
    return register(lambda *_: seen.append(1)).remove


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "forward", "global"])
@pytest.mark.parametrize(
    "name",
    ["self_attn", "self_attn.k_proj", "self_attn.q_norm", "input_layernorm", "mlp"]
    + ["mlp.act_fn", "mlp.down_proj"],
)
def test_hooks_below_a_layer_are_called(name: str, kind: str) -> None:
    model, plain = both("qwen3")
    module = layers(model)[1].get_submodule(name)
    if name == "mlp.act_fn" and kind != "global":
        module = layers(unfuse_(model))[1].get_submodule(name)  # FusedMLP never calls the function
        fuse_(model, "swiglu")
    seen: list[int] = []
    remove = hook(module, kind, seen)
    expected = [] if kind == "global" else [0]
    assert ours(model) == expected
    if name != "mlp.act_fn":
        assert seen
    assert agree(model, plain)
    remove()
    assert ours(model) == [0, 1]


def test_hooks_of_accelerate() -> None:
    """They set forwards: around the fused one on layers, in place of it inside of them."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, plain = both()
    for name, numbers in (("", [0, 1]), ("self_attn", [0]), ("mlp.down_proj", [0])):
        module = layers(model)[1].get_submodule(name)
        add_hook_to_module(module, ModelHook())
        assert ours(model) == numbers
        assert agree(model, plain)
        remove_hook_from_module(module)
        assert ours(model) == [0, 1]
    add_hook_to_module(layers(plain)[0], ModelHook())
    assert are_fused(fuse_(plain)) == [False, True]


@pytest.mark.parametrize("target", ["q_proj", "o_proj", "gate_proj", "down_proj"])
def test_adapters_compute(target: str) -> None:
    """Also where kinds of activations are read anew, as after a change in any model."""
    model, plain = (get_peft_model(m, lora(target, layers_to_transform=[1])) for m in both())
    activations_(small("llama"), "int8")
    for m in (plain, model):
        randomize(m)
        m.eval()
    inner = model.get_base_model()
    assert ours(inner) == [0]
    assert agree(model, plain)
    want = logits(plain)
    with model.disable_adapter():
        assert (logits(model) - want).norm() > 1e-4 * want.norm()
    assert ours(model.unload()) == [0, 1]


def test_a_layer_trains_as_its_class() -> None:
    """Norms are trained; nothing is where no gradient is recorded."""
    model, plain = both()
    for m in (model, plain):
        m(input_ids=ids(2, 7), labels=ids(2, 7)).loss.backward()
    grads = [
        {n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, plain)
    ]
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 5
    for name, grad in grads[0].items():
        assert near(grad, grads[1][name])
    assert ours(model, lambda m: m(ids(2, 7))) == []
    model.requires_grad_(False)
    assert ours(model, lambda m: m(ids(2, 7))) == [0, 1]
    assert ours(model.train()) == []


# ---- arguments


def test_autocast_computes_in_the_dtype_that_it_would() -> None:
    model, plain = both()
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(model) == []
        got, want = logits(model), logits(plain)
    assert got.dtype == want.dtype and (got - want).norm() <= 2**-6 * want.norm()
    assert ours(model) == [0, 1]


def test_other_arguments_reach_the_layer() -> None:
    model, _ = both()
    assert ours(model, lambda m: logits(m, other=None)) == [0, 1]
    assert ours(model, lambda m: logits(m, output_attentions=False)) == [0, 1]
    assert ours(model, lambda m: logits(m, other=3)) == []
    assert ours(model, lambda m: logits(m, use_cache=False)) == [0, 1]


@pytest.mark.parametrize("kind", ["llama", "glm4"])
def test_layers_are_called_in_other_ways(kind: str) -> None:
    """x with a name, no mask, and cos and sin that are written in place."""
    model, plain = both(kind)
    x, positions = torch.randn(1, 2, 64), torch.arange(2)[None]
    angles = tuple(t.clone() for t in model.model.rotary_emb(x, positions))
    layer, own = layers(model)[0], layers(plain)[0]
    with torch.no_grad():
        for _ in range(2):
            want = own(x, position_embeddings=angles)
            for got in (
                layer(x, position_embeddings=angles, attention_mask=None),
                layer(hidden_states=x, position_embeddings=angles),
            ):
                assert near(got, want)
            for t in angles:
                t.mul_(0.5)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_outputs_of_layers_and_attention(kind: str) -> None:
    """The hooks that transformers leaves on attention modules matter only while they collect."""
    model, plain = both(kind)
    for m in (model, plain):
        m.set_attn_implementation("eager")
    for name in ("output_hidden_states", "output_attentions"):
        got, want = (m(ids(2, 7), **{name: True}) for m in (model, plain))
        key = name.removeprefix("output_")
        assert len(got[key]) == len(want[key]) == 2 + (key == "hidden_states")
        for a, b in zip(got[key], want[key], strict=True):
            assert near(a, b)
    assert ours(model) == [0, 1]
    assert ours(model, lambda m: logits(m, output_attentions=True)) == []


# ---- copies, files, and back


def test_copies_and_files_are_fused_and_independent() -> None:
    model, _ = both("gemma3_text")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    want = logits(model)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(are_fused(other)) and ours(other) == [0, 1]
        assert torch.equal(logits(other), want)
        for layer, own in zip(layers(other), layers(model), strict=True):
            assert fused_layer(layer) is not fused_layer(own)
            recipe = fused_layer(layer).recipe
            assert recipe.heads is recipe.branches[0].core
            assert recipe.heads.attention is layer.self_attn
            assert recipe.branches[1].core is layer.mlp.gated
            assert fused_layer(layer).watch.layer is layer
        layers(other)[0].input_layernorm.weight.data.zero_()
        assert not torch.equal(logits(other), want) and torch.equal(logits(model), want)
        shared = {id(fused_layer(layer).step) for layer in layers(other)}
        assert not shared & {id(fused_layer(layer).step) for layer in layers(model)}


def test_an_order_of_columns_that_a_state_dict_brings() -> None:
    model, plain = both()
    name = "model.layers.1.self_attn.o_proj.input_order"
    state = plain.state_dict() | {name: torch.randperm(64)}
    for m in (model, plain):
        m.load_state_dict(state, strict=False)
    assert ours(model) == [0]
    assert agree(model, plain)


def test_unfusing_gives_the_model_back() -> None:
    model = small("gemma2")
    want = logits(model)
    before = dict(model.named_modules())
    for _ in range(2):
        fuse_(fuse_(model))
        assert all(are_fused(model)) and ours(model) == [0, 1]
    unfuse_(model)
    assert dict(model.named_modules()) == before
    assert not any(are_fused(model)) and torch.equal(logits(model), want)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_fusing_leaves_no_trace_of_its_runs() -> None:
    model = small("gemma3_text").train()
    layers(model)[0].eval()
    training = {name: m.training for name, m in model.named_modules()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    fuse_(model)
    assert torch.equal(torch.get_rng_state(), state)
    now = {name: m.training for name, m in model.named_modules()}
    assert {name: now[name] for name in training} == training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(type(m) is LinearPart for m in (layers(model)[0].self_attn.q_proj,))


def test_a_layer_may_take_another_place() -> None:
    """Its number in the cache is read when it is called."""
    model, plain = both()
    for m in (model, plain):
        m.model.layers = nn.ModuleList(reversed(layers(m)))
        for number, layer in enumerate(m.model.layers):
            layer.self_attn.layer_idx = number
    made = [m.generate(**padded(2, 5), max_new_tokens=8, do_sample=False) for m in (model, plain)]
    assert torch.equal(*made) and ours(model) == [0, 1]


def test_what_layers_share_is_of_both_angles_and_the_function() -> None:
    """One cos, and then another sin, attention function or autocast."""
    model, plain = both()
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = model.model.rotary_emb(x, torch.arange(3)[None])
    calls: list[str] = []

    def attention(*args: Any, **kwargs: Any) -> Any:
        calls.append("called")
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("calling", attention)
    first, second = layers(model)
    own = layers(plain)[1]
    with torch.no_grad():
        first(x, position_embeddings=(cos, sin))
        for angles in ((cos, sin), (cos, sin * 0.5)):
            got, want = (each(x, position_embeddings=angles) for each in (second, own))
            assert near(got, want)
        with torch.autocast("cpu", torch.bfloat16):
            got = second(x, position_embeddings=(cos, sin))
            assert torch.equal(got, type(second).forward(second, x, position_embeddings=(cos, sin)))
        model.config._attn_implementation = "calling"
        second(x, position_embeddings=(cos, sin))
    assert calls == ["called"]


def test_a_kernel_that_does_not_run_is_named() -> None:
    """As a shader that Metal does not compile; the layers are the model's own."""
    model = small("llama")

    def load(kernel: str) -> None:
        if kernel.startswith("rope_"):
            raise RuntimeError(f"{kernel} does not compile\nat a line")
        _C.load_emulated(str(shader_library(kernel).path))

    with emulated():
        _C.set_load_kernel(load)
        with pytest.warns(UserWarning, match=r"fuse_: .*rope_\w+ does not compile$"):
            fuse_(model, "swiglu")
    assert [fused_layer(layer).recipe.heads for layer in layers(model)] == [None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_(unfuse_(model), "swiglu")
    assert all(fused_layer(layer).recipe.heads is not None for layer in layers(model))


# ---- modules that are changed later: what they are then decides


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


def a_plain_tensor(model: Any) -> None:
    norm = layers(model)[1].post_attention_layernorm
    weight = norm.weight.detach() * 3
    del norm.weight
    norm.weight = weight


def no_weight(model: Any) -> None:
    """A norm without its factor, in code that allows for one."""
    norm = layers(model)[0].input_layernorm
    norm.weight = None
    norm.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon)


def norms_of_f32(model: Any) -> None:
    for layer in layers(model):
        layer.input_layernorm.float()
        layer.post_attention_layernorm.float()


def halved(norm: nn.Module) -> None:
    register_parametrization(norm, "weight", Half())


CHANGES: dict[str, Callable[[Any], None]] = {
    "parametrized": lambda model: halved(layers(model)[0].input_layernorm),
    "parametrized at the end": lambda model: halved(model.model.norm),
    "a plain tensor": a_plain_tensor,
    "no weight": no_weight,
    "another activation": lambda model: setattr(layers(model)[0].mlp, "act_fn", nn.GELU()),
    "norms of f32": norms_of_f32,
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_changes_after_a_forward_counts(what: str, dtype: torch.dtype) -> None:
    plain = small("llama").to(dtype)
    model = fuse_(copy.deepcopy(plain), "swiglu")
    assert all(are_fused(model))
    with torch.no_grad():
        model(ids(2, 7))
        before = plain(ids(2, 7)).logits
        for each in (plain, model):
            CHANGES[what](each)
        want, got = plain(ids(2, 7)).logits, model(ids(2, 7)).logits
    assert got.dtype == want.dtype
    # What is left of a difference are roundings, of which a layer has a dozen in its dtype.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    assert float((got - want).float().norm() / want.float().norm()) < 24 * unit
    if what not in ("norms of f32", "no weight") and dtype == torch.float32:  # the change is seen
        assert float((want - before).float().norm() / before.float().norm()) > 24 * unit

"""What one does with a sharded model: generate, fuse, compile, train through it, lose a rank."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from hf_models import logits, random_model, tokens
from ranks import RankError, on_each_rank, on_ranks
from test_shard_models import STAGES, built, sensitivity
from tiny_models import tiny_llama, token_ids
from torch import Tensor

from torch_metalmm import activations_, fuse_, load_gguf, quantize_, shard_, unfuse_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.importance import importance
from torch_metalmm.nn import collective
from torch_metalmm.nn.fused import MergedLinear
from torch_metalmm.nn.sharded import Sharded
from torch_metalmm.tools.generate import demo_model

PROMPT, LENGTH = "Once upon a time, in a small village by the sea,", 10


def small_llama() -> Any:
    return quantize_(tiny_llama(), "q4_0", progress=False)


def story(mesh: Any) -> tuple[list[int], int]:
    model, tokenizer = load_gguf(demo_model(), mesh=mesh)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        out: Tensor = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1)
    return out[0, ids.shape[1] :].tolist(), sum(isinstance(m, Sharded) for m in model.modules())


def test_tokens_of_smollm2() -> None:
    """Nine heads of queries, three of keys; a real model from its file, which ranks map."""
    want, _ = story(None)
    assert len(want) == LENGTH and len(set(want)) > 6
    assert on_ranks(4, story) == [(want, 2 + 30 * 7)] * 4


@pytest.mark.parametrize(
    ("name", "cache"), [("llama", None), ("qwen3", None), ("gemma3", None), ("qwen3", "f32")]
)
@on_each_rank(2)
def test_fused_layers(mesh: Any, name: str, cache: str | None) -> None:
    """Whole decoder layers, the sums over the ranks inside; 17 is 1 and the root of K."""
    model = built(name, "q4_0")
    want, plain = logits(model), tokens(model)
    bound = 2.0**-24 * 17 * (STAGES * sensitivity(model, want) + want.double().norm(dim=-1))
    shard_(model, mesh)
    fuse_(model, "swiglu_linear", cache=cache)
    assert sum(fused_layer(m) is not None for m in model.modules()) == 2
    assert sum(isinstance(m, MergedLinear) for m in model.modules()) == 2
    assert torch.equal(tokens(model), plain)
    got = [logits(model), logits(unfuse_(model))]
    assert all(((y.double() - want.double()).norm(dim=-1) <= bound).all() for y in got)


@on_each_rank(2)
def test_int8_activations(mesh: Any) -> None:
    """x is rounded in blocks of 32, which no rank's columns cut: the sums alone differ."""
    model = activations_(built("mistral", "q8_0"), "int8")
    want = logits(model)
    exact = logits(activations_(built("mistral", "q8_0"), None))
    got = logits(shard_(model, mesh))
    assert all(m.activations == "int8" for m in model.modules() if hasattr(m, "activations"))
    # Codes may flip where x differs by a rounding; far fewer than rounding x itself changes.
    assert (got - want).norm() < (want - exact).norm() / 4


@on_each_rank(2)
def test_one_graph_with_the_collectives(mesh: Any) -> None:
    """An all-reduce for the embedding, each output of attention and each MLP."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = shard_(small_llama(), mesh)
    counter = CompileCounterWithBackend("aot_eager")
    quick = torch.compile(model, fullgraph=True, backend=counter)
    ids = token_ids(2, 5)
    with torch.no_grad():
        assert torch.equal(*(m(ids, use_cache=False).logits for m in (quick, model)))
    sums = [n for n in counter.graphs[0].graph.nodes if "all_reduce" in str(n.target)]
    assert len(sums) == 1 + 2 * 2


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
@on_each_rank(2)
def test_gradients_reach_the_input(mesh: Any, fuse: bool) -> None:
    """What a prompt of soft tokens learns: a missing sum over the ranks loses a part of it that is
    as large as the rest."""

    def grad(model: Any) -> Tensor:
        x = torch.randn(1, 6, 256, generator=torch.Generator().manual_seed(0)) / 8
        x.requires_grad_(True)
        model(inputs_embeds=x, use_cache=False).logits.square().mean().backward()
        assert x.grad is not None
        return x.grad

    model = built("llama", "q4_0")
    want = grad(model)
    shard_(model, mesh)
    if fuse:
        fuse_(model, "swiglu")
    assert (grad(model) - want).norm() < 2.0**-12 * want.norm()


@on_each_rank(2)
def test_tensors_by_the_host(mesh: Any) -> None:
    """The group is told to have no backend for the tensors' device: they go by the host."""
    seen: list[str] = []
    model = shard_(built("phi3", "q4_0"), mesh)
    want = logits(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "_has_backend", lambda kind, group: seen.append(kind))
        assert torch.equal(logits(model), want)
    assert seen


def dying(mesh: Any) -> None:
    model = shard_(built("llama", "q4_0"), mesh)
    logits(model)
    if mesh.get_local_rank() == 1:
        os._exit(7)
    begin = time.monotonic()
    try:
        for _ in range(1000):
            logits(model)
    except RuntimeError as error:
        raise OSError(f"after {time.monotonic() - begin:.0f} s: {error}") from None


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankError) as caught:
        on_ranks(2, dying)
    assert caught.value.errors.keys() == {0, 1}
    assert "OSError: after" in caught.value.errors[0]
    assert "ended with 7" in caught.value.errors[1]


@on_each_rank(2)
def test_a_mesh_of_two_dimensions(mesh: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    named = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.inference_mode():
        models = [shard_(small_llama(), m) for m in (mesh, named)]
        assert torch.equal(*(model(token_ids(1, 5)).logits for model in models))
    others = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"mesh has the dimensions \('a', 'b'\); one .* be \"tp\""):
        shard_(tiny_llama(), others)


@on_each_rank(2)
def test_what_is_refused(mesh: Any) -> None:
    from peft import LoraConfig, get_peft_model

    from torch_metalmm import save_gguf, save_mlx

    def adapted(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))

    model = shard_(small_llama(), mesh)
    refused = {
        "model is sharded; a part is not divided again": lambda: shard_(model, mesh),
        "model is sharded; quantize before shard_": lambda: quantize_(model, "q8_0"),
        "save_gguf: the model is sharded": lambda: save_gguf(model, None, "model.gguf"),
        "save_mlx: the model is sharded": lambda: save_mlx(model, None, "folder"),
        "dequantize: the model is sharded": model.dequantize,
        "importance: the model is sharded; do it before shard_": importance(model).__enter__,
        "q_proj is sharded, and an adapter would be of a part of it": lambda: adapted(model),
        "call shard_ before fuse_": lambda: shard_(fuse_(small_llama(), "swiglu"), mesh),
        "has an adapter; merge it, or load it": lambda: shard_(adapted(small_llama()), mesh),
        "mesh must be a DeviceMesh, got str": lambda: shard_(random_model("llama"), "cpu"),
    }
    for said, call in refused.items():
        with pytest.raises((ValueError, TypeError), match=said):
            call()

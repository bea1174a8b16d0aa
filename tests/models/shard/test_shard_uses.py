"""What one does with a sharded model: generate, fuse, compile, train through it, lose a rank."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import pytest
import torch
from hf_models import IDS, logits, random_model, tokens
from ranks import RankError, on_ranks
from test_shard_models import STAGES, built, sensitivity
from tiny_models import tiny_llama, token_ids
from torch import Tensor

from torch_metalmm import activations_, fuse_, load_gguf, quantize_, shard_, unfuse_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.nn import collective
from torch_metalmm.nn.fused import MergedLinear
from torch_metalmm.nn.sharded import Sharded
from torch_metalmm.tools.generate import demo_model

PROMPT, LENGTH = "Once upon a time, in a small village by the sea,", 16


def story(model: Any, tokenizer: Any) -> list[int]:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        out: Tensor = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1)
    return out[0, ids.shape[1] :].tolist()


@functools.cache
def story_of_one() -> list[int]:
    return story(*load_gguf(demo_model()))


def told(mesh: Any) -> tuple[list[int], int]:
    model, tokenizer = load_gguf(demo_model(), mesh=mesh)
    return story(model, tokenizer), sum(isinstance(m, Sharded) for m in model.modules())


@pytest.mark.parametrize("count", [2, 4])
def test_tokens_of_smollm2(count: int) -> None:
    """Nine heads of queries, three of keys; a real model from its file, which ranks map."""
    want = story_of_one()
    assert len(want) == LENGTH and len(set(want)) > 10
    for got, layers in on_ranks(count, told):
        assert got == want
        assert layers == 2 + 30 * 7


def fused(mesh: Any, name: str, cache: str | None) -> tuple[Any, ...]:
    model = built(name, "q4_0")
    want, plain = logits(model), tokens(model)
    bound = 2.0**-24 * 17 * (STAGES * sensitivity(model, want) + want.double().norm(dim=-1))
    shard_(model, mesh)
    fuse_(model, "swiglu_linear", cache=cache)
    layers = [m for m in model.modules() if fused_layer(m)]
    merged = sum(isinstance(m, MergedLinear) for m in model.modules())
    got, made = logits(model), tokens(model)
    unfuse_(model)
    return (
        float(((got.double() - want.double()).norm(dim=-1) / bound).max()),
        torch.equal(plain, made),
        len(layers),
        merged,
        float(((logits(model).double() - want.double()).norm(dim=-1) / bound).max()),
    )


@pytest.mark.parametrize(
    ("name", "cache"), [("llama", None), ("qwen3", None), ("gemma3", None), ("qwen3", "f32")]
)
def test_fused_layers(name: str, cache: str | None) -> None:
    """Whole decoder layers, the sums over the ranks inside; 17 is 1 and the root of K."""
    for worst, same, layers, merged, unfused in on_ranks(2, fused, name, cache):
        print(f"error / bound = {worst:.3g}")
        assert worst <= 1 and unfused <= 1
        assert same
        assert layers == 2 and merged == 2


def cached(mesh: Any) -> list[int]:
    from torch_metalmm import PackedCache

    model = shard_(built("qwen3", "q4_0"), mesh)
    cache = PackedCache(model.config, "q8_0")
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    return [layer.keys.shape[1] for layer in cache.layers]


def test_a_cache_of_fewer_heads() -> None:
    assert on_ranks(2, cached) == [[1, 1]] * 2


def rounded(mesh: Any) -> bool:
    """x is rounded in blocks of 32, which no rank's columns cut: the sums alone differ."""
    model = activations_(built("mistral", "q8_0"), "int8")
    want = logits(model)
    exact = logits(activations_(built("mistral", "q8_0"), None))
    got = logits(shard_(model, mesh))
    assert all(m.activations == "int8" for m in model.modules() if hasattr(m, "activations"))
    # Codes may flip where x differs by a rounding; far fewer than rounding x itself changes.
    return bool((got - want).norm() < (want - exact).norm() / 4)


def test_int8_activations() -> None:
    assert on_ranks(2, rounded) == [True, True]


def compiled(mesh: Any) -> tuple[bool, int]:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = shard_(quantize_(tiny_llama(), "q4_0", progress=False), mesh)
    counter = CompileCounterWithBackend("aot_eager")
    quick = torch.compile(model, fullgraph=True, backend=counter)
    ids = token_ids(2, 5)
    with torch.no_grad():
        same = torch.equal(quick(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    sums = [n for n in counter.graphs[0].graph.nodes if "all_reduce" in str(n.target)]
    return same, len(sums)


def test_one_graph_with_the_collectives() -> None:
    """An all-reduce for the embedding, each output of attention and each MLP."""
    assert on_ranks(2, compiled) == [(True, 1 + 2 * 2)] * 2


def gradients(mesh: Any, fuse: bool) -> float:
    """What a prompt of soft tokens learns, beside the whole model's."""

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
    got = grad(model)
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
def test_gradients_reach_the_input(fuse: bool) -> None:
    """A missing sum over the ranks loses a part of the gradient as large as the rest."""
    for error in on_ranks(2, gradients, fuse):
        assert error < 2.0**-12


def staged(mesh: Any) -> list[bool]:
    """The group is told to have no backend for the tensors' device: they go by the host."""
    seen: list[str] = []
    model = shard_(built("phi3", "q4_0"), mesh)
    want = logits(model)
    known = collective._has_backend

    def without(kind: str, group: Any) -> bool:
        seen.append(kind)
        return False

    collective._has_backend = without
    same = torch.equal(logits(model), want)
    collective._has_backend = known
    return [same, len(seen) > 0]


def test_tensors_by_the_host() -> None:
    assert on_ranks(2, staged) == [[True, True]] * 2


def dying(mesh: Any) -> float:
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
    return 0.0


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankError) as caught:
        on_ranks(2, dying)
    assert caught.value.errors.keys() == {0, 1}
    assert "OSError: after" in caught.value.errors[0]
    assert "ended with 7" in caught.value.errors[1]


def refused(mesh: Any) -> list[str]:
    from peft import LoraConfig, get_peft_model

    from torch_metalmm import save_gguf, save_mlx

    model = shard_(quantize_(tiny_llama(), "q4_0", progress=False), mesh)
    head = {"target_modules": ["q_proj"]}
    calls = (
        lambda: shard_(model, mesh),
        lambda: quantize_(model, "q8_0", progress=False),
        lambda: save_gguf(model, None, "model.gguf"),
        lambda: save_mlx(model, None, "folder"),
        lambda: model.dequantize(),
        lambda: get_peft_model(model, LoraConfig(**head)),
        lambda: shard_(fuse_(quantize_(tiny_llama(), "q4_0", progress=False), "swiglu"), mesh),
        lambda: shard_(
            get_peft_model(quantize_(tiny_llama(), "q4_0", progress=False), LoraConfig(**head)),
            mesh,
        ),
        lambda: shard_(random_model("llama"), "cpu"),
    )
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return said


def of_two_dimensions(mesh: Any) -> tuple[bool, str]:
    from torch.distributed.device_mesh import init_device_mesh

    named = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    one, two = (quantize_(tiny_llama(), "q4_0", progress=False) for _ in range(2))
    same = torch.equal(logits_of(shard_(one, mesh)), logits_of(shard_(two, named)))
    try:
        shard_(tiny_llama(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    except ValueError as error:
        return same, str(error)
    return same, "nothing"


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(token_ids(1, 5)).logits
    return out


def test_a_mesh_of_two_dimensions() -> None:
    said = "mesh has the dimensions ('a', 'b'); one of them must be \"tp\""
    assert on_ranks(2, of_two_dimensions) == [(True, said)] * 2


def test_what_is_refused() -> None:
    for said in on_ranks(2, refused):
        print(said)
        for text, part in zip(
            said,
            (
                "model is sharded; a part is not divided again",
                "model is sharded; quantize before shard_",
                "save_gguf: the model is sharded",
                "save_mlx: the model is sharded",
                "dequantize: the model is sharded",
                "q_proj is sharded, and an adapter would be of a part of it",
                "call shard_ before fuse_",
                "has an adapter; merge it, or load it before shard_",
                "mesh must be a DeviceMesh, got str",
            ),
            strict=True,
        ):
            assert part in text

"""Fused layers that write and read a PackedCache themselves, beside those that call its update."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from layer_models import FUSED, fused, ids, layers, padded
from random_steps import check_sequence
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from bench.models.op_counts import Calls
from torch_metalmm import PackedCache
from torch_metalmm.hf.attention import op_options
from torch_metalmm.hf.caches.slots import FEW_QUERIES

pytestmark = pytest.mark.covering

HEADS_OF_16 = ("phi3", "olmo2", "helium")  # q8_0 needs 32
# Of these the size may be chosen.
CHOSEN = ("llama", "mistral", "qwen2", "smollm3", "granite")


class Updated(PackedCache):
    """A cache whose update() another has written: layers must call it, and the function."""


@functools.cache
def _fused(kind: str) -> Any:
    """Heads that a block of 32 values divides."""
    return fused(kind, **({"head_dim": 32} if kind in CHOSEN else {}))


def fused_model(kind: str) -> Any:
    model = copy.deepcopy(_fused(kind))
    model.set_attn_implementation("metalmm")
    return model


def logits(model: Any, cache: Any, parts: list[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(**p, past_key_values=cache).logits for p in parts], 1)


def parts_of(batch: int, *lengths: int, padding: bool = False) -> list[dict[str, Tensor]]:
    """Inputs one after the other, the mask of each that of all tokens so far."""
    given = padded(batch, sum(lengths))
    tokens, mask = given["input_ids"], given["attention_mask"]
    found, end = [], 0
    for length in lengths:
        end += length
        part = {"input_ids": tokens[:, end - length : end]}
        if padding:
            part["attention_mask"] = mask[:, :end]
        found.append(part)
    return found


def test_no_op_makes_the_slots_of_windows() -> None:
    """Two kinds of layers, each with slots and lengths of its own."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = fused("gemma3_text", num_hidden_layers=4, layer_types=kinds)
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, "q8_0")
    logits(model, cache, parts_of(1, 300))
    logits(model, cache, [{"input_ids": ids(1, 1)}])  # the window has moved its rows
    calls = Calls()
    calls.watch(layers(model))
    with calls:
        logits(model, cache, [{"input_ids": ids(1, 1)}])
    others = [others for _, others in calls.of_layers]
    assert others == [[]] * 4


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("format", [None, "f32", "q8_0"])
@pytest.mark.parametrize("padding", [False, True])
def test_the_bits_are_those_of_update_and_attention_function(
    kind: str, format: str | None, padding: bool
) -> None:
    """Prompts in parts, longer than FEW_QUERIES and shorter, single tokens, windows that slide."""
    if format == "q8_0" and kind in HEADS_OF_16:
        pytest.skip("heads of 16 values")
    model = fused_model(kind)
    parts = parts_of(3, FEW_QUERIES + 5, 1, 1, 4, 1, 2, 1, padding=padding)
    want = logits(model, Updated(model.config, format), parts)
    cache = PackedCache(model.config, format)
    assert torch.equal(logits(model, cache, parts), want)
    static = PackedCache(model.config, format, slots=40)
    got = logits(model, static, parts)
    assert torch.equal(got, logits(model, Updated(model.config, format, slots=40), parts))
    assert int(static.get_seq_length()) == cache.get_seq_length() == FEW_QUERIES + 15


def test_random_steps_with_faults_and_changes() -> None:
    """tests/fuzz.py takes more of them."""
    for number in range(100):
        check_sequence(number)


def test_what_goes_by_update() -> None:
    """Caches of others, an update that was replaced, and an attention function that is not ours."""
    model = fused("llama", format="f32", head_dim=32)
    model.set_attn_implementation("metalmm")
    token = parts_of(1, 1)
    replaced = PackedCache(model.config)
    seen: list[int] = []
    update = replaced.update

    def see(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[2])
        return update(*args, **kwargs)

    replaced.update = see  # type: ignore[method-assign]
    want = logits(model, replaced, token)
    assert seen == [0, 1]
    for cache in (DynamicCache(config=model.config), Updated(model.config)):
        assert torch.equal(logits(model, cache, token), want)
    others = lambda *args, **kwargs: AttentionInterface()["sdpa"](*args, **kwargs)  # noqa: E731
    AttentionInterface.register("others", others)
    model.set_attn_implementation("others")
    cache = PackedCache(model.config, "q8_0")
    calls = Calls()
    with calls:
        logits(model, cache, token)
    assert "attention" not in calls.ours and calls.ours.count("cache_append") == 2


def test_one_graph_of_a_fused_model() -> None:
    model = fused_model("llama")
    parts = parts_of(1, 6, 1, 1, 1)
    want = logits(model, PackedCache(model.config, "q8_0", slots=16), parts)
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    cache = PackedCache(model.config, "q8_0", slots=16)
    compiled = torch.compile(model, backend=count, fullgraph=True)
    with torch.no_grad():
        got = [model(**parts[0], past_key_values=cache).logits]
        got += [compiled(**part, past_key_values=cache).logits for part in parts[1:]]
    assert torch.equal(torch.cat(got, 1), want)
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(graphs) == 1
    for op in ("rope_append", "attention"):
        assert sum(name == f"metalmm.{op}.default" for name in names) == 2, names


def test_a_batch_that_the_cache_does_not_have() -> None:
    model = fused_model("llama")
    cache = PackedCache(model.config)
    logits(model, cache, parts_of(2, 3))
    with pytest.raises(ValueError, match="keys of 1 sequences; it has 2"):
        logits(model, cache, parts_of(1, 1))
    cache.reset()
    logits(model, cache, parts_of(1, 3))
    assert cache.layers[0].keys.shape[0] == 1


USUAL = {"dropout": 0.0, "scaling": 0.25, "sliding_window": 4}
ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, float] | None]] = {
    "usual": ({}, ("position_ids",), {"scale": 0.25, "softcap": 0.0}),
    "soft cap": ({"softcap": 30.0, "is_causal": True}, (), {"scale": 0.25, "softcap": 30.0}),
    "dropout": ({"dropout": 0.1}, (), None),
    "not causal": ({"is_causal": False}, (), None),
    "sinks": ({"s_aux": 1.0}, (), None),
    "a bias": ({}, ("position_bias",), None),
    "a scale of each call": ({}, ("scaling",), None),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_the_op_takes(case: str) -> None:
    """Others are for the attention function to understand."""
    constants, passed, expected = ARGUMENTS[case]
    assert op_options(USUAL | constants, passed) == expected

"""fuse_ on the decoder layers of transformers' families: what they compute, and in how many ops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_models import (
    CASES,
    FUSED,
    PARTS,
    are_fused,
    dense,
    exact,
    family_pair,
    ids,
    logits,
    near,
    padded,
    pair,
)
from torch import Tensor

from bench.models.families import COMMAND, FAMILIES, PAGE, record, versions
from bench.report import model_tables
from bench.tables import read_block, to_markdown
from torch_metalmm import PackedCache, unfuse_
from torch_metalmm.models.fuse.layers import fused_layer

pytestmark = pytest.mark.filterwarnings("ignore")

BOTH = pytest.mark.parametrize("kind", FUSED)


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The tokens, and their logits where there are some."""
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1} | options
    made = model.generate(**inputs, **arguments, output_logits=True, return_dict_in_generate=True)
    return made.sequences, torch.stack(made.logits)


@BOTH
def test_logits_are_as_near_to_float64_as_those_of_the_dense_model(kind: str) -> None:
    model, fused = pair(kind)
    assert all(are_fused(fused)) and not any(are_fused(model))
    decoded = dense(model)
    want = logits(exact(decoded))
    own, got = (logits(m).double() - want for m in (decoded, fused))
    assert got.norm() <= 2 * own.norm()
    assert near(logits(fused), logits(model))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    """The fused model rounds less often; its error from f32 is at most half more, by chance."""
    model, fused = pair(kind, dtype)
    assert all(are_fused(fused))
    want = logits(torch.nn.Module.float(dense(model)))
    got, own = logits(fused), logits(model)
    assert got.dtype == own.dtype
    assert (got.float() - want).norm() <= 1.5 * (own.float() - want).norm()


@pytest.mark.covering
@BOTH
@pytest.mark.parametrize("way", ["beams", "assisted", "static", "long"])
@pytest.mark.parametrize("cache", ["transformers", "packed"])
def test_generation(kind: str, way: str, cache: str) -> None:
    """Ten tokens are past the sliding windows of 4; a prompt of 20 is, too, before the first."""
    options: dict[str, Any] = {
        "beams": {"num_beams": 3},
        "assisted": {"prompt_lookup_num_tokens": 3},
        "static": {"cache_implementation": "static", "disable_compile": True},
    }.get(way, {})
    inputs = {"static": padded(2, 7), "long": {"input_ids": ids(2, 20)}}
    given = inputs.get(way, {"input_ids": ids(1, 7)})
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    made = []
    for model in copy.deepcopy(pair(kind)):
        if cache == "packed":
            model.set_attn_implementation("metalmm")
            options.pop("cache_implementation", None)
            slots = 40 if way == "static" else None
            options["past_key_values"] = PackedCache(model.config, slots=slots)
        made.append(generated(model, given, **options))
    (want, own), (tokens, scores) = made
    assert torch.equal(tokens, want)
    assert near(scores, own, stages=100)  # each token's cache has the errors of those before


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_not_understood_is_called(kind: str) -> None:
    model, fused = pair(kind)
    recipes = [f.recipe for f in map(fused_layer, fused.modules()) if f is not None]
    assert [recipe.rest for recipe in recipes] == [None if PARTS[kind] else (None,)] * 2
    cores = " ".join(type(branch.core).__name__ for branch in recipes[0].branches)
    assert cores == (PARTS[kind] or "Heads")
    inputs = {"input_ids": ids(2, 40)}
    assert near(logits(fused, **inputs), logits(model, **inputs))


def tokens(model: Any, inputs: Any = None, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1} | options
    made: torch.Tensor = model.generate(**(inputs or padded(3, 7)), **options)
    return made


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_page_says_how_many_ops_a_token_takes(kind: str) -> None:
    rows = read_block(PAGE, COMMAND)
    if versions() not in rows:
        pytest.skip("other versions, whose numbers may be others")
    [table] = model_tables([record(kind, *family_pair(kind))])
    counted = to_markdown(table).rpartition(f"| `{kind}`")[2]  # of families with the same numbers
    assert [row.endswith(counted) for row in rows.splitlines() if f"`{kind}`" in row] == [True]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_of_padded_prompts(case: str) -> None:
    model, fused = copy.deepcopy(family_pair(case))
    if case.startswith(("gemma3n_text", "gemma4_text")):
        assert all(are_fused(fused))
    own = {"cache_implementation": "dynamic"}
    assert torch.equal(tokens(fused, **own), tokens(model, **own))
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, "q8_0")
    assert torch.equal(tokens(fused), tokens(model, past_key_values=cache))
    model.set_attn_implementation(unfuse_(fused).config._attn_implementation)
    assert torch.equal(tokens(fused), tokens(model))


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_of_one_prompt(case: str) -> None:
    """Of one row a step makes what it can in one op: cos and sin of all kinds of layers."""
    model, fused = copy.deepcopy(family_pair(case))
    inputs, options = {"input_ids": torch.tensor([[5, 6, 7]])}, {"max_new_tokens": 40}
    model.set_attn_implementation("metalmm")
    own = tokens(model, inputs, past_key_values=PackedCache(model.config, "q8_0"), **options)
    assert torch.equal(tokens(fused, inputs, **options), own)

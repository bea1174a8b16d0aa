"""Families of transformers: the tokens of fused models, with torch's cache and with ours; the page
that says how many ops they take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from family_models import CASES, family_pair
from layer_models import are_fused, padded

from bench.models.families import COMMAND, FAMILIES, PAGE, record, versions
from bench.report import model_tables
from bench.tables import read_block, to_markdown
from torch_metalmm import PackedCache, unfuse_

pytestmark = pytest.mark.filterwarnings("ignore")


def generated(model: Any, inputs: Any = None, **options: Any) -> torch.Tensor:
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
    assert torch.equal(generated(fused, **own), generated(model, **own))
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, "q8_0")
    assert torch.equal(generated(fused), generated(model, past_key_values=cache))
    model.set_attn_implementation(unfuse_(fused).config._attn_implementation)
    assert torch.equal(generated(fused), generated(model))


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_of_one_prompt(case: str) -> None:
    """Of one row a step makes what it can in one op: cos and sin of all kinds of layers."""
    model, fused = copy.deepcopy(family_pair(case))
    inputs, options = {"input_ids": torch.tensor([[5, 6, 7]])}, {"max_new_tokens": 64}
    model.set_attn_implementation("metalmm")
    own = generated(model, inputs, past_key_values=PackedCache(model.config, "q8_0"), **options)
    assert torch.equal(generated(fused, inputs, **options), own)

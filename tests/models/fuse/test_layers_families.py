"""Families of transformers: the tokens of fused models, with torch's cache and with ours; the page
that says how many ops they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_models import SHARED, are_fused, padded

from bench.models.families import COMMAND, FAMILIES, PAGE, family, fused_family, record, versions
from bench.report import model_tables
from bench.tables import read_block, to_markdown
from torch_metalmm import PackedCache, unfuse_

pytestmark = pytest.mark.filterwarnings("ignore")


def generated(model: Any, **options: Any) -> torch.Tensor:
    options |= {"max_new_tokens": 20, "do_sample": False, "eos_token_id": -1}
    made: torch.Tensor = model.generate(**padded(3, 7), **options)
    return made


# Keys that layers share, values that are keys before their norm, embeddings for each layer.
CASES = [(kind, {}) for kind in FAMILIES] + [
    ("gemma4_text", SHARED),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("gemma3n_text", SHARED | {"activation_sparsity_pattern": [0.0] * 4}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_greedy_tokens_of_padded_prompts(kind: str, options: dict[str, Any]) -> None:
    model = family(kind, **options)
    fused = fused_family(model)
    if not options:
        rows = read_block(PAGE, COMMAND)
        [table] = model_tables([record(kind, model, fused)])
        others = versions() not in rows  # whose numbers may be others
        assert others or to_markdown(table).splitlines()[-1] in rows.splitlines()
    if kind == "gemma4_text":
        assert all(are_fused(fused))
    own = {"cache_implementation": "dynamic"}
    assert torch.equal(generated(fused, **own), generated(model, **own))
    model.set_attn_implementation("metalmm")
    cache = PackedCache(model.config, "q8_0")
    assert torch.equal(generated(fused), generated(model, past_key_values=cache))
    model.set_attn_implementation(unfuse_(fused).config._attn_implementation)
    assert torch.equal(generated(fused), generated(model))

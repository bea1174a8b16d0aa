"""PackedCache of a model whose layers attend and scan: packed rows, and states as they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_models import logits, near
from torch import Tensor
from transformers import DynamicCache

from bench.models.families import family
from torch_metalmm import PackedCache, fuse_
from torch_metalmm.hf.caches.hybrid import HybridPackedLayer
from torch_metalmm.models.cache_argument import with_cache

pytestmark = pytest.mark.filterwarnings("ignore")


def run(model: Any, cache: Any, ids: Tensor) -> Tensor:
    return logits(model, input_ids=ids, **with_cache(model, cache))


@pytest.mark.parametrize("fused", [False, True])
def test_a_cache_of_rows_and_states(fused: bool) -> None:
    """In the model's dtype as torch's own: prompts, steps, an order of other sequences, a reset."""
    model = family("falcon_h1")
    model = fuse_(copy.deepcopy(model), "swiglu") if fused else model
    ids = torch.arange(3, 3 + 2 * 30).view(2, 30)
    caches = [DynamicCache(config=model.config), PackedCache(model.config)]
    assert type(caches[1].layers[0]) is HybridPackedLayer
    for _ in range(2):
        for part in ids.split([3, 20, 1, 5, 1], 1):
            want, got = (run(model, cache, part) for cache in caches)
            assert near(got, want, 256, 2 * 14)
            assert caches[1].get_seq_length() == caches[0].get_seq_length()
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
        want, got = (run(model, cache, ids[:, :1]) for cache in caches)
        assert near(got, want, 256, 2 * 14)
        for cache in caches:
            cache.reset()


def test_what_a_state_does_not_allow(tmp_path: Path) -> None:
    model = family("falcon_h1")
    cache = PackedCache(model.config, "q8_0")
    run(model, cache, torch.arange(3, 9)[None])
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-2)
    assert cache.get_seq_length() == 6
    with pytest.raises(ValueError, match="HybridPackedLayer; only keys and values can be saved"):
        cache.save(tmp_path / "rows")
    assert not list(tmp_path.iterdir())

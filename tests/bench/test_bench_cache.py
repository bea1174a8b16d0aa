"""`python -m bench cache`: predictions and answers are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from measured import records_of

from bench.models import quality
from bench.options import parse
from torch_metalmm import formats
from torch_metalmm.hf.caches import pair_of

pytestmark = pytest.mark.usefixtures("own_threads")


def test_caches_are_compared_with_dynamic(tmp_path: Path) -> None:
    records = records_of(tmp_path, "cache", "--formats", "f32,q4_0/q4_0")
    dynamic, exact, rounded = [r for r in records if r["kind"] == "cache-quality"]
    assert dynamic["divergence"] == 0 and dynamic["equal"] == [4] * quality.PROMPTS
    assert exact["perplexity"] == pytest.approx(dynamic["perplexity"], rel=1e-5)
    assert exact["same_top"] == 1 and exact["equal"] == dynamic["equal"]
    assert 0.01 < rounded["divergence"] < 1 and 0.5 < rounded["same_top"] < 1


def test_tokens_before_the_first_difference() -> None:
    a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 7, 4])
    assert (
        quality.equal_tokens(a, a),
        quality.equal_tokens(a, b),
        quality.equal_tokens(a, a + 1),
    ) == (4, 2, 0)


def test_every_default_format_fits_the_models() -> None:
    """Blocks that divide the heads of SmolLM2, and of models with heads of 128."""
    args = parse(["cache"])
    pairs = [pair_of(name) for name in quality.caches_named(args.formats)]
    blocks = [formats.get(name).block_values for pair in pairs for name in pair]
    assert len(pairs) == 17 and not any(128 % n or 64 % n for n in blocks)

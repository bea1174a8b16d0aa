"""Batches of prompts of different lengths, padded on the left: each row as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from tiny_models import tiny_llama, token_ids
from torch import Tensor

from torch_metalmm import fuse_, quantize_

LENGTHS = (3, 11, 1, 7)


def generated(model: Any, rows: list[Tensor]) -> list[list[int]]:
    """The four greedy tokens after each row, all rows in one batch."""
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    inputs = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
    with torch.inference_mode():
        return model.generate(**inputs, **options)[:, longest:].tolist()


@pytest.mark.parametrize(
    ("format", "dtype", "fused"),
    [("q4_k", torch.float32, False), ("affine4_g64", torch.bfloat16, True)],
)
def test_rows_of_a_random_model(
    format: str, dtype: torch.dtype, fused: bool, backend: Backend
) -> None:
    """Weights spread so that no two tokens are within the rounding of each other."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight *= 50
    quantize_(model.to(dtype), format, progress=False).to(backend.device)
    if fused:
        fuse_(model, "swiglu_linear")
    rows = [token_ids(n, seed=n) for n in LENGTHS]
    batch = generated(model, rows)
    assert batch == [generated(model, [row])[0] for row in rows]
    assert len({tuple(row) for row in batch}) == len(rows)

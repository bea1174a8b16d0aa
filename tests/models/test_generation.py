"""Batches of prompts of different lengths, padded on the left: each row as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from layer_models import are_fused, layers
from tiny_models import tiny_llama, token_ids
from torch import Tensor

from torch_metalmm import fuse_, load_gguf, quantize_
from torch_metalmm.tools.generate import demo_model

LENGTHS = (3, 11, 1, 7)


def generate(model: Any, rows: list[Tensor], pad: int, tokens: int) -> list[list[int]]:
    """The greedy tokens after each row, all rows in one batch."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    with torch.inference_mode():
        out = model.generate(**inputs, pad_token_id=pad, **options)
    return out[:, longest:].tolist()


def alone(model: Any, rows: list[Tensor], pad: int, tokens: int) -> list[list[int]]:
    return [generate(model, [row], pad, tokens)[0] for row in rows]


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
    batch = generate(model, rows, 0, 4)
    assert batch == alone(model, rows, 0, 4)
    assert len({tuple(row) for row in batch}) == len(rows)


def test_prompts_to_smollm2() -> None:
    """A real model, from its GGUF file, and the same one fused."""
    model, tokenizer = load_gguf(demo_model())
    prompts = (
        "The capital of France is",
        "Once upon a time, in a small village by the sea, there lived a",
        "2, 4, 6,",
        "def add(a, b):",
    )
    rows = [tokenizer(p, return_tensors="pt").input_ids[0] for p in prompts]
    assert len({len(row) for row in rows}) > 2
    pad, want = tokenizer.eos_token_id, alone(model, rows, tokenizer.eos_token_id, 16)
    print([tokenizer.decode(row) for row in want])
    assert generate(model, rows, pad, 16) == want
    fuse_(model, "swiglu")
    assert all(are_fused(model)) and len(layers(model)) == 30
    assert generate(model, rows, pad, 16) == want

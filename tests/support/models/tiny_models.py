"""Transformers models of a few layers with random weights, for tests."""

from __future__ import annotations

from typing import Any

import torch

from bench.models.families import new_model, sizes

VOCABULARY = 128


def tiny_llama(seed: int = 0, **options: Any) -> Any:
    """A Llama of 2 layers, hidden 256, in eval mode; `options` go to its config."""
    return new_model("llama", sizes(256, 512, VOCABULARY) | options, seed=seed)


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids without the special ones."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=g)

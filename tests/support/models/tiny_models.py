"""Transformers models of a few layers with random weights, for tests."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 128


def tiny_llama(seed: int = 0, **options: Any) -> Any:
    """A Llama of 2 layers, hidden 256, in eval mode; `options` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(sizes | options))).eval()


def token_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids without the special ones."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=g)

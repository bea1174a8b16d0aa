"""Small models that are trained, byte by byte, before caches are compared on them.

Random weights attend to all tokens alike; what a cache loses shows where attention chooses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS, BATCH, LENGTH, RATE = 400, 8, 256, 2e-3
_SIZES = {
    **{"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 1024},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
# Norms of queries and keys; windows besides; layer norms, biases and half a rotation.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 1},
    "gemma3_text": {"num_key_value_heads": 1, "sliding_window": 64, "query_pre_attn_scalar": 64},
    "phi": {"num_key_value_heads": 2},
}


def byte_ids(text: str) -> Tensor:
    """The text's bytes, int64 [1, T]."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()[None]


@torch.inference_mode(False)
def trained(kind: str, ids: Tensor, steps: int) -> Any:
    """A causal model of that type, f32, after `steps` of AdamW on ids, int64 [1, T]."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SIZES | KINDS[kind])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = ids.clone()  # one of no inference
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for _ in range(steps):
        first = torch.randint(ids.shape[1] - LENGTH, (BATCH, 1))
        part = ids[0, first + torch.arange(LENGTH)]
        model(input_ids=part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)

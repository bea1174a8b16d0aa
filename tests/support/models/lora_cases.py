"""A small model, adapters on it and what they add, for the tests of LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from torch_metalmm import quantize_

FORMATS = ("q4_k", "q8_0", "mxfp4", "affine4_g64", "f16")
SCALING = 2.0  # alpha / r, a power of two: multiplying by it rounds nothing


def lora(*targets: str, **options: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=4 * SCALING, target_modules=list(targets), **options)


class Block(nn.Module):
    """up, SiLU, down: two layers that take adapters, and an embedding."""

    def __init__(self, format: str, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 256)
        self.up = nn.Linear(256, 512, bias=bias)
        self.down = nn.Linear(512, 256, bias=bias)
        quantize_(self, format, progress=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def randomize(model: nn.Module, adapter: str = "default", std: float = 0.05, seed: int = 0) -> None:
    """Draw the weights of an adapter, which PEFT makes so that it changes nothing."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name and f".{adapter}" in name and "magnitude" not in name:
                p.copy_(torch.randn(p.shape, generator=g) * std)


def adapted(format: str, *targets: str, bias: bool = False, **options: Any) -> Any:
    model = get_peft_model(Block(format, bias), lora(*targets, **options))
    randomize(model)
    return model


def delta(layer: Any, adapter: str = "default") -> Tensor:
    """What the adapter adds to a linear layer's weight."""
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return (b @ a).detach() * SCALING


# What PEFT and transformers say of their own code, and the report that test_lora_merge reads.
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{text}:{kind}")
    for text, kind in (
        (".is_gradient_checkpointing.", "FutureWarning"),
        (".gradient_checkpointing_enable.", "FutureWarning"),
        ("Setting .save_embedding_layers. to .True.", "UserWarning"),
        ("packing .* merged layers again", "UserWarning"),
    )
]

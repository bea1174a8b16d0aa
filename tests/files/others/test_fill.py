"""fill: what becomes of layers that a checkpoint has packed and the model needs dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_metalmm import QuantExperts, formats
from torch_metalmm.files.fill import fill
from torch_metalmm.models.integers.affine import Rows
from torch_metalmm.nn.gate import Gate


class Block(nn.Module):
    """A router, a plain linear layer whose weight the block reads, beside packed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = QuantExperts(4, 32, 32, {"up_proj": "q8_0", "down_proj": "q8_0"}, Gate())

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.gate.weight.dtype) @ self.gate.weight.t()


class Given:
    """A source of one tensor, which `rows` reads."""

    def __init__(self, name: str) -> None:
        self.keys, self.path = {name: name}, Path("x")


def test_a_router_whose_weight_the_model_reads_is_decoded() -> None:
    model: Any = nn.ModuleDict({"mlp": Block()})
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    packed = formats.get("q8_0").quantize(weight)
    source: Any = Given("mlp.gate.weight")
    done = {"mlp.experts.up_proj", "mlp.experts.down_proj"}
    fill(
        model,
        source,
        {"mlp.gate": ["mlp.gate.weight"]},
        lambda name, module: Rows("q8_0", packed),
        "cpu",
        done,
    )
    assert type(model["mlp"].gate) is nn.Linear
    assert torch.equal(model["mlp"].gate.weight, formats.get("q8_0").dequantize(packed, 32))

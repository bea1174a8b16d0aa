"""What the tests of adopt_ share: weights of ggml's types, and what an adopted layer computes."""

from __future__ import annotations

from typing import Any

import oracle
from gguf import GGMLQuantizationType as Type
from inputs import activations, random_weight
from oracle import check
from torch import Tensor, nn

from torch_metalmm import QuantLinear, adopt_, formats

GGML = tuple(t for t in Type if t.name.lower() in formats.names())
BLOCKS = tuple(t for t in GGML if t not in (Type.F32, Type.F16, Type.BF16))
X = activations(3, 256)


def adopted(layer: nn.Module) -> Any:
    """What `layer` becomes in a model."""
    return adopt_(nn.Sequential(layer))[0]


def computes(layer: QuantLinear, w: Tensor, bias: Tensor | None = None) -> None:
    assert type(layer) is QuantLinear
    fixed = None if bias is None else bias.detach()
    check(layer(X), oracle.linear(X, w, fixed), layer.format)


def packed(kind: Type, n: int = 24, k: int = 256) -> Tensor:
    return random_weight(kind.name.lower(), n, k)

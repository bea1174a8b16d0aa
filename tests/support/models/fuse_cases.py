"""Small modules that fuse_ changes, with random packed weights."""

from __future__ import annotations

from typing import Any

import torch
from inputs import activations, random_weight
from oracle import spec
from torch import Tensor, nn

from torch_metalmm import QuantLinear, fuse_
from torch_metalmm.models.fuse.apply import _unshared
from torch_metalmm.models.fuse.merge import merge_projections

K, N = 256, 512


def packed(format: str, n: int, k: int, bias: bool = False, seed: int = 0) -> QuantLinear:
    b = activations(n, seed=("bias", seed)) if bias else None
    return QuantLinear.from_packed(random_weight(format, n, k, seed), k, format, b)


class Attention(nn.Module):
    """Three layers of one input, as attention has them, and one of another."""

    def __init__(self, formats: tuple[str, str, str] = ("q4_k",) * 3, bias: bool = False) -> None:
        super().__init__()
        sizes = zip(formats, (48, 16, 24), strict=True)
        self.a, self.b, self.c = (packed(f, n, K, bias, i) for i, (f, n) in enumerate(sizes))
        self.out = packed("q8_0", 8, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.a(x), self.b(x), self.c(x)


class Gated(nn.Module):
    """down(act(one(x)) * two(x)), with names that say nothing."""

    def __init__(self, format: str = "q4_k", act: nn.Module | None = None) -> None:
        super().__init__()
        self.one, self.two = packed(format, N, K, seed=1), packed("q8_0", N, K, seed=2)
        self.three = packed(format, K, N, bias=True, seed=3)
        self.act = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.act(self.one(x)) * self.two(x))


class Halves(nn.Module):
    """gate and up in one layer, either first."""

    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.both, self.down = packed("q5_1", 2 * N, K, seed=1), packed("q4_k", K, N, seed=2)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        if not self.gate_first:
            gate, up = up, gate
        return self.down(up * nn.functional.silu(gate))


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(bias=bias), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*self.attention(x), self.mlp(x)], -1)


def fused(module: nn.Module, form: str | None = "swiglu") -> Any:
    """The module after fuse_, in a model of its own."""
    return fuse_(nn.Sequential(module), form)[0]


def merged(attention: Attention, within: nn.Module | None = None) -> Any:
    """The module, its layers of one input merged as fuse_ does those of a decoder layer."""
    layers = (attention.a, attention.b, attention.c)
    merge_projections(attention, layers, _unshared(within or attention))
    return attention


def decoded(layer: QuantLinear) -> Tensor:
    return spec(layer.format, layer.weight, layer.in_features)

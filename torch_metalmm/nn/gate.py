"""The step between the products of a gated MLP: an activation of the gate, times the other half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# By their names in the ops.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
SWIGLU_OAI = "swiglu_oai"  # g sigmoid(alpha g) (u + 1), an activation of expert_swiglu alone


@dataclass(frozen=True)
class Gate:
    """act(gate) * up as expert_swiglu computes it.

    activation: of ACTIVATIONS, or SWIGLU_OAI, which reads alpha. With a limit gate is at most that,
    and |up| too. interleaved: every other row of a merged weight is gate's, else the first half.
    """

    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    interleaved: bool = False

    def split(self, merged: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
        """gate and up of what has both along `dim`; views."""
        if self.interleaved:
            dim %= merged.dim()
            pairs = merged.view(*merged.shape[:dim], -1, 2, *merged.shape[dim + 1 :])
            gate, up = pairs.unbind(dim + 1)
        else:
            gate, up = merged.chunk(2, dim)
        return gate, up

    def merge(self, gate: Tensor, up: Tensor, dim: int = -1) -> Tensor:
        """The inverse of split, a copy."""
        if not self.interleaved:
            return torch.cat((gate, up), dim)
        dim %= gate.dim()
        return torch.stack((gate, up), dim + 1).flatten(dim, dim + 1)

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """activation(gate) * up in torch's ops."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == SWIGLU_OAI:
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return ACTIVATIONS[self.activation](gate) * up

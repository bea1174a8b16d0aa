"""The experts of a mixture with packed weights: a stack [E, N, row_bytes] for each product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import get as _spec  # `formats` is an argument here
from .activations import Activations, of_call
from .gate import ACTIVATIONS, Gate
from .packed import PackedState

_expert_linear = torch.ops.metalmm.expert_linear.default
_expert_swiglu = torch.ops.metalmm.expert_swiglu.default

GATE_UP, GATE, UP, DOWN = "gate_up_proj", "gate_proj", "up_proj", "down_proj"
# The stacks that a module has: gate and up in one, as transformers has them; apart, as GGUF files
# have them, whose bytes then need no copy; and without a gate.
MERGED, APART, UNGATED = (GATE_UP, DOWN), (GATE, UP, DOWN), (UP, DOWN)
_FORMS = (MERGED, APART, UNGATED)


class QuantExperts(Activations, PackedState):
    """Sum over c of weights[t, c] expert ids[t, c] (x[t]), the weights of experts packed.

    An expert is down(act(gate x) * up x), or down(act(up x)), with biases or without. The stacks
    are frozen uint8 parameters [E, rows, row_bytes] with the names that transformers has for them:
    gate_up_proj [E, 2 N, ...] or, apart, gate_proj and up_proj [E, N, ...]; down_proj [E, H, ...].
    gate_up_proj_bias [E, 2 N] is gate's first and then up's where they are apart. `.to(dtype)`
    converts the biases alone.

    activations, set by activations_: as QuantLinear has it.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        formats: Mapping[str, str],
        gate: Gate,
        biases: Iterable[str] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """formats: {stack: format}, in one of the three forms. biases: names, of this dtype.

        ValueError: other stacks, an unknown format, a K that is no multiple of its block.
        """
        super().__init__()
        stacks = tuple(formats)
        if stacks not in _FORMS:
            raise ValueError(f"formats: stacks {stacks}; allowed: {', '.join(map(str, _FORMS))}")
        self.num_experts, self.hidden_dim = num_experts, hidden_dim
        self.intermediate_dim = intermediate_dim
        self.gate = gate
        self.formats: dict[str, str] = {}
        for stack, format in formats.items():
            rows, k = self.shape(stack)
            size = (num_experts, rows, _spec(format).row_bytes(k))
            self.put(stack, torch.empty(size, dtype=torch.uint8, device=device), format)
        for name in biases:
            zeros = torch.zeros(self._bias_shape(name), device=device, dtype=dtype)
            setattr(self, name, nn.Parameter(zeros, requires_grad=False))

    @property
    def is_gated(self) -> bool:
        """Whether an expert has two products before the last."""
        return tuple(self.formats) != UNGATED

    def _bias_shape(self, name: str) -> tuple[int, int]:
        stack = name.removesuffix("_bias")
        rows = 2 * self.intermediate_dim if stack == GATE_UP else self.shape(stack)[0]
        return self.num_experts, rows

    def shape(self, stack: str) -> tuple[int, int]:
        """(rows, K) of an expert's matrix."""
        n, h = self.intermediate_dim, self.hidden_dim
        return (h, n) if stack == DOWN else (2 * n if stack == GATE_UP else n, h)

    def put(self, stack: str, weight: Tensor, format: str) -> None:
        """Give a stack other bytes, uint8 [E, rows, row_bytes] or [E rows, row_bytes]; no copy.

        ValueError: they do not fit the format.
        """
        spec = _spec(format)
        rows, k = self.shape(stack)
        want = (self.num_experts, rows, spec.row_bytes(k))
        flat = (want[0] * want[1], want[2])
        if weight.dtype != torch.uint8 or tuple(weight.shape) not in (want, flat):
            raise ValueError(
                f"{stack} must be uint8 {list(want)} ({spec.name}, K = {k}), "
                f"got {weight.dtype} {list(weight.shape)}"
            )
        if weight.shape != want or not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight.detach().view(want), requires_grad=False)
        setattr(self, stack, weight)
        self.formats[stack] = spec.name

    def packed(self) -> dict[str, tuple[str, int]]:
        return {stack: (format, self.shape(stack)[1]) for stack, format in self.formats.items()}

    def rows_of_both(self, merged: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of gate and of up in gate_up_proj or its bias, [E, 2 N, ...]; views."""
        if GATE in self.formats:
            gate, up = merged.chunk(2, 1)
            return gate, up
        return self.gate.split(merged, 1)

    def dequantize(self, stack: str, dtype: torch.dtype | None = None) -> Tensor:
        """The matrices [E, rows, K] of a stack, a new dense tensor of `dtype` (default float32)."""
        weight = self.get_parameter(stack)
        out: Tensor = torch.ops.metalmm.dequantize(
            weight.flatten(0, 1), self.formats[stack], self.shape(stack)[1], dtype=dtype
        )
        return out.view(*weight.shape[:2], -1)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index [T, C] int, top_k_weights [T, C] float; [T, H].

        An id of no expert: as torch.ops.metalmm.expert_linear.
        """
        kind = of_call(self._activations, hidden_states)
        inner = self._inner(hidden_states, top_k_index, kind, self._parameters)
        return self._down(inner, top_k_index, top_k_weights, kind, self._parameters)

    def mixed(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        residual: Tensor | None,
        stacks: dict[str, Tensor] | None,
    ) -> Tensor:
        """forward() + residual, with other stacks where they are given."""
        kind, p = of_call(self._activations, x), stacks or self._parameters
        more = kind if residual is None else kind | {"residual": residual}
        return self._down(self._inner(x, ids, kind, p), ids, weights, more, p)

    def _down(
        self, inner: Tensor, ids: Tensor, scores: Tensor | None, options: Any, p: Any
    ) -> Tensor:
        return _expert_linear(
            inner, p[DOWN], ids, p.get(f"{DOWN}_bias"), self.formats[DOWN], scores, **options
        )

    def _inner(self, x: Tensor, ids: Tensor, kind: dict[str, str], p: Any) -> Tensor:
        """The input of each chosen expert's down, [T, C, N]."""
        named, gate = self.formats, self.gate
        bias = p.get(f"{GATE_UP}_bias")
        if not self.is_gated:
            y = _expert_linear(x, p[UP], ids, p.get(f"{UP}_bias"), named[UP], **kind)
            return ACTIVATIONS[gate.activation](y)
        if GATE in p and named[GATE] != named[UP]:  # which the op does not know
            b = (None, None) if bias is None else bias.chunk(2, dim=-1)
            parts = [
                _expert_linear(x, p[stack], ids, part, named[stack], **kind)
                for stack, part in zip((GATE, UP), b, strict=True)
            ]
            return gate.of(*parts)
        first = GATE if GATE in p else GATE_UP
        options: dict[str, Any] = {"limit": gate.limit, "alpha": gate.alpha, **kind}
        if first == GATE:
            options["up_weight"] = p[UP]
        return _expert_swiglu(
            x, p[first], ids, bias, named[first], gate.activation,
            gate.interleaved and first == GATE_UP, **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        named = ", ".join(f"{stack}={format}" for stack, format in self.formats.items())
        sizes = f"{self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}"
        return f"{sizes}, {self.gate.activation}, {named}"


class SortedExperts(QuantExperts):
    """The experts of a model that has a copy of all tokens for each (Llama 4).

    x [E T, H] holds the tokens of expert 0, then those of expert 1, and so on, times the weight of
    the expert for the token: 0 for all but top_k of the experts, where the result is 0 then.
    """

    top_k: int

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """hidden_states [E T, H], at most top_k of a token's E rows not 0; [E T, H]."""
        e, h = self.num_experts, self.hidden_dim
        by_token = hidden_states.view(e, -1, h).transpose(0, 1)  # [T, E, H]
        # NaN counts as the largest, so that it is not lost.
        ids = by_token.detach().abs().amax(-1).topk(min(self.top_k, e)).indices
        where = ids.unsqueeze(-1).expand(-1, -1, h)
        kind = of_call(self._activations, hidden_states)
        p = self._parameters
        inner = self._inner(by_token.gather(1, where), ids, kind, p)
        rows = self._down(inner, ids, None, kind, p)
        out = rows.new_zeros(by_token.shape).scatter(1, where, rows)  # autocast: not x's dtype
        return out.transpose(0, 1).reshape(-1, h)

"""A mixture of experts in our ops: the part of a fused layer between its norm and its sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .exact import as_one_row
from .experts import DOWN, GATE, GATE_UP, UP
from .fused import GatedMLP
from .linear import QuantLinear
from .router import Router, format_of, tensor_of

_expert_linear = torch.ops.metalmm.expert_linear.default

_FEW = 16  # rows up to which experts and the shared one are read as one stack
_MOST = 31  # choices of route beside a shared one
_SURE = 64.0  # 1 + exp(-64) is 1 in f32


@dataclass(eq=False)
class Mixture:
    """The experts that a router chooses for x, and an MLP of each x times sigmoid(gate x).

    given: the name of the module's tensor that the router takes beside x. gate: a QuantLinear, or
    one of torch's without a bias, which GGUF files have; None: the MLP counts as it is. experts: a
    QuantExperts.
    """

    module: nn.Module
    router: Router
    given: str | None
    experts: Any
    shared: GatedMLP | None = None
    gate: Any = None
    _key: tuple[int, ...] = field(default=(), compare=False, repr=False)  # addresses, of
    _stacked: bool = field(default=False, compare=False, repr=False)
    _whole: Tensor | None = field(default=None, compare=False, repr=False)
    _first: Tensor | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Another model's memory is another.
        return {**self.__dict__, "_key": (), "_whole": None, "_first": None}

    def linears(self) -> list[Any]:
        """The linear layers that our ops compute."""
        shared = [] if self.shared is None else [*self.shared.layers()]
        return [*shared, self.gate] if isinstance(self.gate, QuantLinear) else shared

    def floats(self) -> list[Tensor | None]:
        """The parameters that are not packed."""
        is_dense = self.gate is not None and not isinstance(self.gate, QuantLinear)
        return [self.gate._parameters["weight"]] if is_dense else []

    def of(self, ops: Any, x: Tensor, residual: Tensor | None) -> Tensor:
        """The mixture of x [..., K], and the residual."""
        rows = x.reshape(-1, x.shape[-1])
        own = self.module._parameters | self.module._buffers
        given = () if self.given is None else (own[self.given],)
        added = None if residual is None else residual.reshape(rows.shape)
        router = self.router
        stacks = None if rows.shape[0] > _FEW else self.stacks()
        is_apart = stacks is None and self._is_scored(rows)
        of_shared = {} if stacks is None and not is_apart else self._counted(ops, rows)
        weights, ids = router.choose(router.module, rows, *given, **of_shared)
        if is_apart:
            added = self._scored(ops, rows, weights[:, -1:], added)
            weights, ids = weights[:, :-1], ids[:, :-1]
        elif stacks is None and self.shared is not None:
            logit = None if self.gate is None else ops.linear(rows, *self._row())
            added = self._shared(ops, rows, logit, added)
        y: Tensor = self.experts.mixed(rows, ids, weights, added, stacks)
        return y.view(x.shape)

    def _row(self) -> tuple[Tensor, Tensor | None, str]:
        """(weight, bias, format) of the gate."""
        weight, bias = (self.gate._parameters[name] for name in ("weight", "bias"))
        return weight, bias, format_of(self.gate, weight)

    def _counted(self, ops: Any, rows: Tensor) -> dict[str, Any]:
        """The arguments of route for the shared expert: its logit, or the row that makes the logit.

        route's product with the row is exact, and has no bias.
        """
        if self.gate is None:
            return {"shared": self._counts_whole(rows)}
        weight, bias, format = self._row()
        rounds = ops.activations is not None and isinstance(self.gate, QuantLinear)
        if rounds or bias is not None:
            return {"shared": ops.linear(rows, weight, bias, format)}
        return {"shared_weight": weight, "shared_format": format}

    def _counts_whole(self, rows: Tensor) -> Tensor:
        """Logits whose sigmoid is 1, [rows, 1]."""
        held = self._whole
        if held is None or held.dtype != rows.dtype or held.device != rows.device:
            held = self._whole = rows.new_full((_FEW, 1), _SURE)
        return held[: rows.shape[0]]

    def _is_scored(self, rows: Tensor) -> bool:
        """Whether route weights a shared expert that is no part of the stack: of one row, or of
        rows that have the bits of single ones.

        The op on experts, which multiplies by a score, gathers more rows into tiles.
        """
        if self.gate is None or self.router.top_k > _MOST or torch.compiler.is_compiling():
            return False
        down: Any = self.shared.layers()[2]  # type: ignore[union-attr]
        return as_one_row(rows) and down._parameters["bias"] is None

    def _scored(self, ops: Any, rows: Tensor, score: Tensor, added: Tensor | None) -> Tensor:
        """The shared MLP of rows times score [rows, 1], as an expert of one, and what is added."""
        h, down = self._inner(ops, rows)
        held = self._first
        if held is None or held.device != rows.device:
            held = self._first = rows.new_zeros(_FEW, 1, dtype=torch.int64)
        kind = {"activations": ops.activations} if ops.activations else {}
        stack, ids = down._parameters["weight"][None], held[: rows.shape[0]]
        given = (h[:, None], stack, ids, None, down.format, score)
        y: Tensor = _expert_linear(*given, residual=added, **kind)
        return y

    def _inner(self, ops: Any, rows: Tensor) -> tuple[Tensor, Any]:
        """The input of the shared MLP's down, and down itself."""
        mlp: Any = self.shared
        gate, up, down = mlp.layers()
        given = (*mlp.weights(gate, up), gate.format, up.format, mlp.activation)
        return ops.swiglu(rows, *given), down

    def _shared(self, ops: Any, rows: Tensor, logit: Tensor | None, added: Tensor | None) -> Tensor:
        h, down = self._inner(ops, rows)
        weight, bias = down._parameters["weight"], down._parameters["bias"]
        if logit is None:
            return ops.linear(h, weight, bias, down.format, None, added)
        y, factor = ops.linear(h, weight, bias, down.format), torch.sigmoid(logit)
        return y * factor if added is None else torch.addcmul(added, y, factor)

    def stacks(self) -> dict[str, Tensor] | None:
        """The stacks of the experts with the shared one behind them, where it lies there.

        Views of this call: kept, they would hold the memory of weights that were replaced.
        """
        if torch.compiler.is_compiling() or self.shared is None:
            return None
        parts, layers = self.parts(), self.shared.layers()
        held = [t for of in parts.values() for t in of]
        key = tuple(at for t in held for at in (t.data_ptr(), t.untyped_storage().data_ptr()))
        if key != self._key:
            self._key, self._stacked = key, all(map(_is_stack, parts.values()))
        own = self.experts.activations
        alike = all(m.activations == own and m._parameters["bias"] is None for m in layers)
        if not (self._stacked and alike):
            return None
        return {n: _stack(experts) for n, (experts, *_) in parts.items()}

    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """{stack: (the experts', the shared one's)}; gate and up of this may be two."""
        experts, mlp = self.experts, self.shared
        gate, up, down = mlp.layers()  # type: ignore[union-attr]
        of_gate, of_up = mlp.weights(gate, up)  # type: ignore[union-attr]
        of = {GATE_UP: (of_gate, of_up), GATE: (of_gate,), UP: (of_up,)}
        of[DOWN] = (down._parameters["weight"],)
        return {s: (experts._parameters[s], *of[s]) for s in experts.formats}


@torch.inference_mode(False)
@torch.no_grad()
def join(r: Mixture) -> None:
    """Let the shared expert lie behind the others, where it is one of their kind: a copy.

    Its gate lies behind the router, where both are of one kind: route reads them as one.
    Names and shapes of all tensors stay: they are parts of one stack then.
    """
    e, mlp = r.experts, r.shared
    if mlp is None or r.router.top_k > _MOST:
        return
    if r.gate is not None:
        _join_rows(*tensor_of(r.router.module, r.router.weight), r.gate)
    if not e.is_gated or mlp.roles.up is None:
        return
    gate, up, down = mlp.layers()
    kinds = {gate.format, up.format} == {e.formats.get(GATE_UP, e.formats.get(GATE))}
    kinds = kinds and down.format == e.formats[DOWN] and e.formats.get(UP, up.format) == up.format
    rule = e.gate.limit is None and e.gate.activation == mlp.activation and not e.gate.interleaved
    sizes = (gate.out_features, down.in_features) == (e.intermediate_dim,) * 2
    bare = down.bias is None and not any(n.endswith("_bias") for n in e._parameters)
    bare = bare and all(t.dtype == torch.uint8 for of in r.parts().values() for t in of)
    if not (kinds and rule and sizes and bare):
        return
    for of_experts, *own in r.parts().values():
        count, size = len(of_experts), of_experts[0].numel()
        stack = torch.cat([of_experts.detach().reshape(-1), *(t.reshape(-1) for t in own)])
        of_experts.data = stack[: count * size].view(of_experts.shape)
        for weight, values in zip(own, stack[count * size :].chunk(len(own)), strict=True):
            weight.data = values.view(weight.shape)


def _join_rows(router: nn.Module, table: Tensor, gate: Any) -> None:
    row = gate._parameters["weight"]
    kinds = [(format_of(m, t), t.dtype, t.device) for m, t in ((router, table), (gate, row))]
    if kinds[0] == kinds[1]:
        rows = torch.cat([table.detach(), row.detach()])
        table.data, row.data = rows[:-1], rows[-1:]


def _is_stack(parts: tuple[Tensor, ...]) -> bool:
    """Whether the last parts are an expert more, behind the others."""
    experts, *own = parts
    end = experts.data_ptr() + experts.numel()
    for weight in own:
        if weight.data_ptr() != end or weight.dtype != experts.dtype:
            return False
        end += weight.numel()
    size = (len(experts) + 1) * experts[0].numel()
    held = experts.untyped_storage().nbytes() - experts.storage_offset()
    return end == experts.data_ptr() + size and experts.is_contiguous() and held >= size


def _stack(experts: Tensor) -> Tensor:
    """The experts and the one behind them."""
    shape = (len(experts) + 1, *experts.shape[1:])
    return experts.detach().as_strided(shape, experts.stride())

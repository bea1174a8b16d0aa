"""The modules that fuse_ puts in place of others: linear layers of one input, and gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .activations import Activations, of_call, set_activations
from .collective import all_reduce
from .exact import as_one_row
from .linear import QuantLinear
from .settings import Settings
from .sharded import ColumnsLinear, RowsLinear, entered

_linear = torch.ops.metalmm.linear.default
_swiglu = torch.ops.metalmm.swiglu.default
_swiglu_linear = torch.ops.metalmm.swiglu_linear.default

FORMS = ("swiglu", "swiglu_linear")
PLAIN = (QuantLinear, RowsLinear, ColumnsLinear)


class MergedLinear(Activations, nn.Module):
    """Linear layers of one input as one: their rows in one weight, uint8 [sum of N, row_bytes].

    The layers stay in the model as LinearParts, which own nothing and compute alone where the
    model calls them; a fused layer reads the tensors of this module, for all at once.

    state_dict has the layers' own names and nothing of this module.

    Rejected: QuantLinears whose weights are views behind each other, read as one by as_strided.
    `.to()`, deepcopy and load_state_dict(assign=True) lay them apart. A step can look where they
    lie, 1.2 us a layer; a compiled graph cannot: inductor's read what lay behind an assigned
    weight, without an error. Three products take 1.07 times as long a token, compiled 1.08
    (SmolLM2's sizes, q8_0, one thread).
    """

    weight: Tensor
    bias: Tensor | None
    originals: list[QuantLinear]

    def __init__(self, layers: dict[str, QuantLinear]) -> None:
        """layers: by their names below the parent, in the order of their rows."""
        super().__init__()
        self.names = tuple(layers)
        self.originals = list(layers.values())
        first = self.originals[0]
        self.format, self.in_features = first.format, first.in_features
        set_activations(self, first.activations)
        self.rows: list[tuple[int, int]] = []
        begin = 0
        for layer in self.originals:
            self.rows.append((begin, begin + layer.out_features))
            begin += layer.out_features
        weight = torch.cat([layer.weight.detach() for layer in self.originals])
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias = None
        if first.bias is not None:
            biases = torch.cat([layer.bias.detach() for layer in self.originals])
            bias = nn.Parameter(biases, requires_grad=False)
        self.register_parameter("bias", bias)
        # Emptied, so that their bytes exist once. In a list they are no children: the parts are.
        for layer in self.originals:
            layer._parameters.update(weight=None, bias=None)

    def attach(self, parent: nn.Module) -> None:
        """Put the parts in place of the layers, and this module beside the parts."""
        for index, name in enumerate(self.names):
            part = LinearPart(self, index).train(self.originals[index].training)
            parent.set_submodule(name, part)
        parent.add_module(self._name(), self)

    def detach(self, parent: nn.Module) -> None:
        """Undo attach. Adapters around the parts stay, around the layers."""
        for name, part in list(parent.named_modules()):
            if isinstance(part, LinearPart) and part.merged is self:
                parent.set_submodule(name, self.restore(part.index).train(part.training))
        delattr(parent, self._name())

    def _name(self) -> str:
        return "merged_" + "_".join(self.names).replace(".", "_")

    def part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) of layer `index`: views of the merged ones."""
        a, b = self.rows[index]
        return self.weight[a:b], None if self.bias is None else self.bias[a:b]

    def restore(self, index: int) -> QuantLinear:
        """The layer as it was before merging. Its tensors are views; nothing is copied."""
        layer = self.originals[index]
        set_activations(layer, self.activations)
        weight, bias = self.part(index)
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    def _save_to_state_dict(self, *args: Any) -> None:
        pass  # the parts save

    def _load_from_state_dict(self, *args: Any) -> None:
        pass  # the parts load

    def extra_repr(self) -> str:
        sizes = "+".join(str(b - a) for a, b in self.rows)
        return f"in_features={self.in_features}, out_features={sizes}, format={self.format}"


class LinearPart(QuantLinear):
    """One of the layers of a MergedLinear; weight and bias are views of its rows.

    Loading a state_dict copies into them. Setting them is an error: unfuse_ first.
    """

    merged: MergedLinear

    def __init__(self, merged: MergedLinear, index: int) -> None:
        nn.Module.__init__(self)
        original = merged.originals[index]
        self.in_features, self.out_features = original.in_features, original.out_features
        self.format, self.index = original.format, index
        self.register_buffer("input_order", None)
        self.__dict__["merged"] = merged  # not a child: it is one of the parent

    @property
    def activations(self) -> str | None:
        return self.merged.activations

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.merged.part(self.index)[0]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.merged.part(self.index)[1]

    def forward(self, x: Tensor) -> Tensor:
        merged = self.merged
        given, kind = entered(merged.originals[self.index], x), of_call(merged.activations, x)
        return _linear(given, *merged.part(self.index), self.format, **kind)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        raise ValueError(f"{name} belongs to a fused layer and cannot be set; call unfuse_ first")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("weight", "bias"):
            if (value := getattr(self, name)) is not None:
                destination[prefix + name] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        # Into a layer of its own that shares these rows, which checks and copies as any other.
        layer = QuantLinear.from_packed(self.weight, self.in_features, self.format, self.bias)
        copied = {**local_metadata, "assign_to_params_buffers": False}
        layer._load_from_state_dict(state_dict, prefix, copied, *rest)


@dataclass(frozen=True)
class Roles:
    """The names of gate, up and down in an MLP. up None: gate and up are halves of one layer."""

    gate: str
    up: str | None
    down: str
    gate_first: bool = True


@dataclass(frozen=True)
class GatedMLP:
    """A module that computes scale * down(act(gate_scale * gate(x)) * up(x)).

    activation: as the ops call it. drops: in training it computes something else, a dropout. cut:
    act is given what is above the mean of a row and `cut` of its standard deviations, less these;
    0: all.
    """

    module: Any
    roles: Roles
    activation: str = "silu"
    drops: bool = False
    gate_scale: float = 1.0
    scale: float = 1.0
    cut: float = 0.0

    def entered(self, gate: Tensor) -> Tensor:
        """The argument of act, by this gate."""
        if self.cut:
            std, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
            gate = torch.relu(gate - torch.add(mean, std, alpha=self.cut))
        return gate if self.gate_scale == 1 else gate * self.gate_scale

    def layers(self) -> tuple[Any, Any, Any]:
        """gate, up and down; gate is up where both are halves of one layer."""
        layers, roles = self.module._modules, self.roles
        gate = layers[roles.gate]
        return gate, gate if roles.up is None else layers[roles.up], layers[roles.down]

    def others(self) -> list[tuple[str, nn.Module | None]]:
        """The children that are none of these, by name."""
        names = (self.roles.gate, self.roles.up, self.roles.down)
        return [(n, child) for n, child in self.module._modules.items() if n not in names]

    def weights(self, gate: Any, up: Any) -> tuple[Tensor, Tensor]:
        """The packed weights of gate and up."""
        gate_weight, up_weight = gate._parameters["weight"], up._parameters["weight"]
        if self.roles.up is None:
            half = gate_weight.shape[0] // 2
            gate_weight, up_weight = gate_weight[:half], up_weight[half:]
            if not self.roles.gate_first:
                gate_weight, up_weight = up_weight, gate_weight
        return gate_weight, up_weight


class FusedMLP(nn.Module):
    """An MLP down(act(gate(x)) * up(x)) whose gate and up are computed by one op.

    Stands in for `gated.module` and shares its children, under their names, which may be any but
    those of this class. A single row (decoding) takes the form, more rows always the first:
      "swiglu"         gate, up, activation and product in one op, then down
      "swiglu_linear"  gate, then up, then activation, product and down in one op
    With a cut of the gate all rows take the second.
    Rejected: the form that takes less time on this machine. On 1 and 2 cores of an AVX-512 CPU both
    take the same, within 5 % (q4_0, q4_k and q8_0, 576 x 1536 to 2048 x 5632), so that noise chose,
    and with noise the roundings of an answer. GPUs were not compared.
    Where a layer is not a plain packed one any more (it got an adapter or a hook), or the module
    has changed, it computes itself.
    """

    gated: Any = None
    form = ""

    def __init__(self, gated: GatedMLP, form: str) -> None:
        super().__init__()
        self._modules = gated.module._modules
        # Not a child: its parameters would have two names.
        self.gated, self.form, self._others = gated, form, gated.others()
        self._settings = Settings([gated.module, *(c for _, c in self._others if c is not None)])
        self.training = gated.module.training

    def forward(self, x: Tensor) -> Tensor:
        gated, children = self.gated, self._modules
        gate, up, down = gated.layers()
        replaced = any(children.get(name) is not child for name, child in self._others)
        replaced = replaced or (self.training and gated.drops)
        packed = plain(gate) and plain(up) and plain(down) and self._settings.same()
        if replaced or not packed or gate.activations != up.activations:
            gated.module.training = self.training
            return gated.module(x)
        gate_weight, up_weight = gated.weights(gate, up)
        weight, bias = down._parameters["weight"], down._parameters["bias"]
        ranks = down.shard.ranks if type(down) is ColumnsLinear else None
        if ranks is not None and ranks.rank:
            bias = None  # rank 0 adds it
        x = entered(gate, x)
        if gated.cut or (self.form == "swiglu_linear" and as_one_row(x)):
            a = _linear(x, gate_weight, None, gate.format, **of_call(gate.activations, x))
            a = gated.entered(a)
            b = _linear(x, up_weight, None, up.format, **of_call(up.activations, x))
            kind = of_call(down.activations, x)
            y = _swiglu_linear(a, b, weight, bias, down.format, gated.activation, **kind)
        else:
            given = (x, gate_weight, up_weight, gate.format, up.format, gated.activation)
            kind = of_call(gate.activations, x)
            h = _swiglu(*given, gate_scale=gated.gate_scale, **kind)
            y = _linear(h, weight, bias, down.format, **of_call(down.activations, x))
        y = y if ranks is None else all_reduce(y, ranks)
        return y if gated.scale == 1 else y * gated.scale

    def extra_repr(self) -> str:
        return f"activation={self.gated.activation}, form={self.form}"


def plain(layer: Any) -> bool:
    """Whether calling the layer is one call of the op: packed, without hook or input order.

    A sharded layer's call may be that of this rank's rows, or of its term of a sum.
    """
    kind = type(layer)
    if kind not in PLAIN or layer._buffers["input_order"] is not None or not unhooked(layer):
        return False
    return not (
        kind is RowsLinear and layer.gathered or kind is ColumnsLinear and layer.split_input
    )


def owner_of(module: nn.Module) -> Any:
    """The object whose method is the module's forward in place of its class's, or None."""
    return getattr(module.__dict__.get("forward"), "__self__", None)


def unhooked(module: nn.Module) -> bool:
    """Whether calling the module calls its class's forward and nothing else."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # accelerate's hooks
    )

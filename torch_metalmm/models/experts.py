"""Modules of stacked experts, and the packed ones that take their place."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..nn.experts import APART, GATE, GATE_UP, MERGED, UP, QuantExperts, SortedExperts
from .structure import Structure, structure_of

Site = tuple[str, Any]  # a layer, or a Stack of a module of experts, by name
Sites = list[Site]  # the layers and stacks that hold one weight


class Stack:
    """One weight of a module of experts, dense or packed, as quantize_ and the loaders see it."""

    def __init__(self, home: Home, leaf: str) -> None:
        self.home, self.leaf = home, leaf

    @property
    def weight(self) -> Tensor:
        """The parameter of the module; of a dense module, in its order of axes."""
        owner = self.home.module
        leaf = self.leaf
        if (
            not isinstance(owner, QuantExperts)
            and leaf in (GATE, UP)
            and GATE_UP in owner._parameters
        ):
            leaf = GATE_UP
        return owner.get_parameter(leaf)

    @property
    def format(self) -> str | None:
        packed = self.home.module
        return packed.formats[self.leaf] if isinstance(packed, QuantExperts) else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, rows, K)."""
        e = self.home.made.num_experts
        return (e, *self.home.made.shape(self.leaf))

    def put(self, model: nn.Module, names: list[str], weight: Tensor, format: str) -> None:
        """Give the packed module these bytes; with its last stack it replaces the dense one.

        names: of the stack in the model.
        """
        self.home.put(model, [n.rpartition(".")[0] for n in names], self.leaf, weight, format)

    def dense(self) -> Tensor:
        """[E rows, K] of the module; of a packed one, in the smallest dtype that has its values."""
        module = self.home.module
        if isinstance(module, QuantExperts):
            exact = formats.get(module.formats[self.leaf]).exact
            return module.dequantize(self.leaf, exact).flatten(0, 1)
        return self.rows(self.weight.detach())

    def rows(self, weight: Tensor) -> Tensor:
        """[E rows, K] of a tensor that is as the dense module has it."""
        structure = self.home.structure
        assert structure is not None
        if structure.transposed:
            weight = weight.transpose(1, 2)
        if self.leaf in (GATE, UP) and GATE_UP in structure.stacks:
            weight = structure.gate.split(weight, 1)[self.leaf == UP]
        return weight.reshape(-1, weight.shape[-1])


class Home:
    """A module of experts and the packed one that takes its place once all its stacks are given."""

    def __init__(self, module: nn.Module, structure: Structure | None, made: QuantExperts) -> None:
        self.module, self.structure, self.made = module, structure, made
        self._left = set() if isinstance(module, QuantExperts) else set(made.formats)

    @property
    def stacks(self) -> dict[str, Stack]:
        """{leaf: stack}, made anew: kept here, they would be a cycle that holds dense weights."""
        return {leaf: Stack(self, leaf) for leaf in self.made.formats}

    def put(
        self, model: nn.Module, names: list[str], stack: str, weight: Tensor, format: str
    ) -> None:
        """Give a stack its bytes; with the last, the packed module replaces the dense one."""
        self.made.put(stack, weight, format)
        self._left.discard(stack)
        if not self._left:
            self.made.train(self.module.training)
            for name in names:
                model.set_submodule(name, self.made)


def homes(model: nn.Module, apart: Container[str] = ()) -> dict[str, Home]:
    """{name: home} of the model's experts that a packed module computes.

    apart: names of those whose gate and up become a stack each.
    """
    found: dict[int, Home | None] = {}
    named = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not any(p is not None and p.dim() == 3 for p in module._parameters.values()):
            continue
        if id(module) not in found:
            found[id(module)] = home_of(model, name, name in apart)
        home = found[id(module)]
        if home is not None:
            named[name] = home
    return named


def unpackable(model: nn.Module) -> dict[str, Tensor]:
    """{name: weight [E, ., .]} of stacked experts that no packed module computes."""
    known = homes(model)
    return {
        f"{name}.{leaf}": p
        for name, module in model.named_modules()
        if name not in known and not type(module).__module__.startswith("torch.")
        for leaf, p in module._parameters.items()
        if p is not None and p.is_floating_point()
        if p.dim() == 3 and p.shape[0] > 1 and min(p.shape[1:]) >= 32
    }


def home_of(model: nn.Module, name: str, apart: bool = False) -> Home | None:
    """The home of the experts of that name; None if no packed module computes what they do.

    apart: gate and up become a stack each.
    """
    module = model.get_submodule(name)
    if isinstance(module, QuantExperts):
        return Home(module, None, module)
    structure = structure_of(module)
    if structure is None:
        return None
    top_k = 0
    if structure.in_order:
        top_k = getattr(model.get_submodule(name.rpartition(".")[0]), "top_k", 0)
        if not isinstance(top_k, int) or top_k < 1:
            return None
    return Home(module, structure, _empty(module, structure, apart, top_k))


def _empty(module: nn.Module, structure: Structure, apart: bool, top_k: int) -> QuantExperts:
    """The packed module, its biases those of the dense one, its stacks without data."""
    stacks = APART if apart and structure.stacks == MERGED else structure.stacks
    kind = SortedExperts if structure.in_order else QuantExperts
    # f32, whose blocks divide every K, until the stacks are given.
    made = kind(
        structure.experts,
        structure.hidden,
        structure.intermediate,
        dict.fromkeys(stacks, "f32"),
        structure.gate,
        device="meta",
    )
    if isinstance(made, SortedExperts):
        made.top_k = top_k
    for name in structure.biases:
        bias = module.get_parameter(name).detach()
        if stacks == APART and name == f"{GATE_UP}_bias":
            bias = torch.cat(structure.gate.split(bias), -1)
        setattr(made, name, nn.Parameter(bias, requires_grad=False))
    return made


def dense_format(weight: Tensor) -> str:
    """The format of a stack that stays as it is beside packed ones."""
    return formats.DTYPE_NAMES.get(weight.dtype, "f32")


def unpack_into(dense: nn.Module, packed: QuantExperts, dtype: torch.dtype) -> None:
    """Give a module of dense experts what the packed one decodes to, in its order of axes."""
    structure = structure_of(dense)
    assert structure is not None
    apart = GATE in packed.formats
    for stack in structure.stacks:
        if stack == GATE_UP and apart:
            halves = packed.dequantize(GATE, dtype), packed.dequantize(UP, dtype)
            value = structure.gate.merge(*halves, dim=1)
        else:
            value = packed.dequantize(stack, dtype)
        if structure.transposed:
            value = value.transpose(1, 2).contiguous()
        setattr(dense, stack, nn.Parameter(value))
    for name in structure.biases:
        bias = packed.get_parameter(name)
        if apart and name == f"{GATE_UP}_bias":
            gate, up = bias.chunk(2, -1)
            bias = nn.Parameter(structure.gate.merge(gate, up))
        setattr(dense, name, bias)

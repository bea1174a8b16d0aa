"""Modules of stacked experts: found by their tensors, understood by running them, packed.

transformers has some 70 classes of them. What tells them apart is which way round a stack lies,
whether gate and up alternate, and the gate: all that is tried, on small experts with random weights
that the class's own forward is run on. A module that computes nothing of this stays as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..nn.experts import (
    APART,
    DOWN,
    GATE,
    GATE_UP,
    MERGED,
    UNGATED,
    UP,
    QuantExperts,
    SortedExperts,
)
from ..nn.gate import ACTIVATIONS, SWIGLU_OAI, Gate
from .fuse.draw import normal

_TOKENS, _CHOSEN = 4, 2
_SCALES = (0.5, 100.0)  # of x: gates about 1, where activations differ, and beyond every limit
_CLOSE = 2e-6  # of the largest result: some modules compute in f32. gelu and gelu_tanh: 3e-5
_DENSE = {dtype: name for name, dtype in formats.DTYPES.items()}


@dataclass(frozen=True)
class Structure:
    """How a module of experts computes: its stacks, the order of their axes, its gate.

    transposed: a stack is [E, K, rows]. in_order: the module gets the tokens of each expert, as
    SortedExperts.
    """

    stacks: tuple[str, ...]
    experts: int
    hidden: int
    intermediate: int
    biases: tuple[str, ...]
    transposed: bool
    gate: Gate
    in_order: bool


def structure_of(module: nn.Module) -> Structure | None:
    """The structure of a module of dense experts; None if no packed one computes the same."""
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    stacks = next((s for s in (MERGED, UNGATED) if set(s) <= parameters.keys()), None)
    if stacks is None or isinstance(module, QuantExperts):
        return None
    biases = tuple(f"{s}_bias" for s in stacks if f"{s}_bias" in parameters)
    if parameters.keys() != {*stacks, *biases} or module._buffers or _state_below(module):
        return None
    if any(not p.is_floating_point() for p in parameters.values()):
        return None
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    for transposed in (False, True):
        sizes = _sizes(stacks, shapes, transposed)
        if sizes is not None:
            found = _computes(module, Structure(stacks, *sizes, biases, transposed, Gate(), False))
            if found is not None:
                return found
    return None


def _state_below(module: nn.Module) -> bool:
    """Whether a child has weights, as a norm has; activation functions have none."""
    return any(True for child in module.children() for _ in child.state_dict())


def _sizes(
    stacks: tuple[str, ...], shapes: dict[str, tuple[int, ...]], transposed: bool
) -> tuple[int, int, int] | None:
    """(E, H, N), if the shapes are those of experts that lie this way."""
    down, first = shapes[DOWN], shapes[stacks[0]]
    if len(down) != 3 or len(first) != 3:
        return None
    e, h, n = (down[0], down[2], down[1]) if transposed else down
    rows = 2 * n if stacks == MERGED else n
    want = {stacks[0]: (e, h, rows) if transposed else (e, rows, h), DOWN: down}
    want |= {f"{stacks[0]}_bias": (e, rows), f"{DOWN}_bias": (e, h)}
    return (e, h, n) if all(want[name] == shape for name, shape in shapes.items()) else None


# ---- what a module computes


def _computes(module: nn.Module, structure: Structure) -> Structure | None:
    """The structure with the gate of the module, if the module computes it for one."""
    probe, tensors = _small(module, structure)
    e, h = len(tensors[DOWN]), tensors[DOWN].shape[2 if structure.transposed else 1]
    ids = normal(_TOKENS, e, seed=1).topk(_CHOSEN).indices
    scores = normal(_TOKENS, _CHOSEN, seed=2).double()
    args: tuple[Tensor, ...] = ids, scores
    gates = list(_gates(module, structure))
    with torch.no_grad():
        for scale in _SCALES:
            x = normal(_TOKENS, h).double() * scale
            got = _run(probe, x, *args)
            if got is None and scale == _SCALES[0]:  # it takes the tokens of each expert, perhaps
                args = ()
                ids = torch.arange(e, device="cpu").repeat_interleave(_TOKENS).unsqueeze(1)
                scores = torch.ones_like(ids, dtype=torch.float64)
            if not args:
                x = x.repeat(e, 1)
                got = _run(probe, x)
            if got is None:
                return None
            gates = [
                gate
                for gate in gates
                if _close(got, _reference(tensors, structure, gate, x, ids, scores))
            ]
    return replace(structure, gate=gates[0], in_order=not args) if gates else None


def _run(probe: Any, *args: Tensor) -> Tensor | None:
    """What the class's own forward gives, not the one that the config chooses."""
    try:
        got = inspect.unwrap(type(probe).forward)(probe, *(t.clone() for t in args))
    except Exception:
        return None  # it takes other arguments, or needs more than its weights
    return got if isinstance(got, Tensor) else None


def _close(got: Tensor, want: Tensor) -> bool:
    same = got.shape == want.shape
    return same and bool((got - want).abs().max() <= _CLOSE * want.abs().max())


def _small(module: nn.Module, structure: Structure) -> tuple[Any, dict[str, Tensor]]:
    """A copy of the module with small experts of random weights, and these by their names.

    Sizes that the module remembers are changed with the weights; its own may be on meta.
    """
    n = 5
    e, h = (
        3,
        {structure.intermediate: n, 2 * structure.intermediate: 2 * n}.get(structure.hidden, 8),
    )
    known = {structure.experts: e, structure.hidden: h, structure.intermediate: n}
    known[2 * structure.intermediate] = 2 * n
    rows = 2 * n if structure.stacks == MERGED else n
    first = structure.stacks[0]
    small = {first: (e, h, rows) if structure.transposed else (e, rows, h)}
    small |= {DOWN: (e, n, h) if structure.transposed else (e, h, n)}
    small |= {f"{first}_bias": (e, rows), f"{DOWN}_bias": (e, h)}
    tensors = {
        name: normal(*small[name], seed=3 + i).double()
        for i, name in enumerate((*structure.stacks, *structure.biases))
    }
    probe = copy.copy(module)
    probe.__dict__ = {
        name: known.get(value, value) if type(value) is int else value
        for name, value in vars(module).items()
    }
    probe.__dict__["_parameters"] = {n: nn.Parameter(t, False) for n, t in tensors.items()}
    return probe, tensors


def _gates(module: nn.Module, structure: Structure) -> Iterator[Gate]:
    """The gates that the module may have; limits and alphas are among its numbers."""
    if structure.stacks == UNGATED:
        yield from (Gate(name) for name in ACTIVATIONS)
        return
    numbers = {
        float(value)
        for value in vars(module).values()
        if isinstance(value, float | int) and not isinstance(value, bool) and value > 0
    }
    for interleaved in (False, True):
        for name in ACTIVATIONS:
            yield Gate(name, interleaved=interleaved)
            yield from (Gate(name, limit, interleaved=interleaved) for limit in numbers)
        for limit, alpha in permutations(numbers, 2):
            yield Gate(SWIGLU_OAI, limit, alpha, interleaved)


def _reference(
    tensors: dict[str, Tensor],
    structure: Structure,
    gate: Gate,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
) -> Tensor:
    """What experts of this structure give, in torch's ops."""

    def product(stack: str, x: Tensor) -> Tensor:
        w = tensors[stack][ids]
        y = torch.einsum("tck,tckn->tcn" if structure.transposed else "tck,tcnk->tcn", x, w)
        bias = tensors.get(f"{stack}_bias")
        return y if bias is None else y + bias[ids]

    first = product(structure.stacks[0], x.unsqueeze(1).expand(-1, ids.shape[1], -1))
    if structure.stacks == UNGATED:
        inner = ACTIVATIONS[gate.activation](first)
    else:
        inner = gate.of(*gate.split(first))
    return (product(DOWN, inner) * scores.unsqueeze(-1)).sum(1)


# ---- the stacks of a module


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
        """[E rows, K] of the module."""
        module = self.home.module
        if isinstance(module, QuantExperts):
            return module.dequantize(self.leaf).flatten(0, 1)
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
        self.stacks = {leaf: Stack(self, leaf) for leaf in made.formats}

    def put(
        self, model: nn.Module, names: list[str], stack: str, weight: Tensor, format: str
    ) -> None:
        """Give a stack its bytes; with the last of them the packed module replaces the dense one."""
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
    return _DENSE.get(weight.dtype, "f32")


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
            bias = nn.Parameter(structure.gate.merge(*bias.chunk(2, -1)))
        setattr(dense, name, bias)

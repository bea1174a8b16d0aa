"""The structure of a module of stacked experts, understood by running it.

transformers has some 70 classes of such modules. They differ in which way round a stack lies, in
whether gate and up alternate, and in the gate: each is tried, on small experts with random weights
that the class's own forward is run on. A module that computes something else has no structure.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.experts import DOWN, MERGED, UNGATED, QuantExperts
from ..nn.gate import ACTIVATIONS, SWIGLU_OAI, Gate
from .fuse.runs import normal

_TOKENS, _CHOSEN = 4, 2
_SCALES = (0.5, 100.0)  # times x: gates about 1, where activations differ, and past every limit
_CLOSE = 2e-6  # times the largest result: some modules compute in f32. gelu and gelu_tanh: 3e-5


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
    # A child with weights is a norm or the like; activation functions have none.
    has_others = any(child.state_dict() for child in module.children())
    if parameters.keys() != {*stacks, *biases} or module._buffers or has_others:
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


def _sizes(
    stacks: tuple[str, ...], shapes: dict[str, tuple[int, ...]], transposed: bool
) -> tuple[int, int, int] | None:
    """(E, H, N), if the shapes are those of experts that lie this way."""
    down, first = shapes[DOWN], shapes[stacks[0]]
    if len(down) != 3 or len(first) != 3:
        return None
    e, h, n = (down[0], down[2], down[1]) if transposed else down
    want = _shapes(stacks, e, h, n, transposed)
    return (e, h, n) if all(want[name] == shape for name, shape in shapes.items()) else None


def _shapes(
    stacks: tuple[str, ...], e: int, h: int, n: int, transposed: bool
) -> dict[str, tuple[int, ...]]:
    """The shapes of the stacks and biases of experts of these sizes, by name."""
    first, rows = stacks[0], 2 * n if stacks == MERGED else n
    return {
        first: (e, h, rows) if transposed else (e, rows, h),
        DOWN: (e, n, h) if transposed else (e, h, n),
        f"{first}_bias": (e, rows),
        f"{DOWN}_bias": (e, h),
    }


# ---- the structure of a module, by its results


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
            if got is None and scale == _SCALES[0]:  # perhaps the class takes tokens by expert
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
    if not gates or (structure.biases and not args):  # rows of 0, which SortedExperts leaves 0
        return None
    return replace(structure, gate=gates[0], in_order=not args)


def _run(probe: Any, *args: Tensor) -> Tensor | None:
    """The result of the class's own forward, not of the one that the config chooses."""
    try:
        got = inspect.unwrap(type(probe).forward)(probe, *(t.clone() for t in args))
    except Exception:
        return None  # the forward takes other arguments, or needs more than its weights
    return got if isinstance(got, Tensor) else None


def _close(got: Tensor, want: Tensor) -> bool:
    same = got.shape == want.shape
    return same and bool((got - want).abs().max() <= _CLOSE * want.abs().max())


def _small(module: nn.Module, structure: Structure) -> tuple[Any, dict[str, Tensor]]:
    """A copy of the module with small experts of random weights, and these by their names.

    Sizes that the module remembers are changed with the weights; its own may be on meta.
    """
    n = 5
    of_n = {structure.intermediate: n, 2 * structure.intermediate: 2 * n}
    e, h = 3, of_n.get(structure.hidden, 8)
    known = {structure.experts: e, structure.hidden: h} | of_n
    small = _shapes(structure.stacks, e, h, n, structure.transposed)
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
    """The result of experts of this structure, in torch's ops."""

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


def activation_of(function: Any) -> str | None:
    """The name in ACTIVATIONS of what the function computes."""
    x = normal(64).double() * 3
    with torch.no_grad():
        got = function(x.clone())
    return next((name for name, act in ACTIVATIONS.items() if _close(got, act(x))), None)

"""Inputs and settings of the short runs by which fuse_ finds and confirms a module's recipe.

Random numbers are the same at every call, whatever the caller's generator, device and dtype are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))  # types of a constant argument


class Unknown(Exception):
    """The layer does something that no recipe says."""


def one(found: Iterable[Any]) -> Any:
    """The only one of what is found; Unknown: it is none or several."""
    found = list(found)
    if len(found) != 1:
        raise Unknown(f"{len(found)} of what there should be one")
    return found[0]


def split(
    calls: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]], renames: bool = False
) -> tuple[dict[str, str], dict[str, Any]]:
    """({argument of a call: that of the layer which is passed on as it}, {the others: a constant}).

    calls, layers: their arguments by name, in each run. renames: the layer's may have another name.
    Unknown: an argument is neither, or not there in each call.
    """
    passed, constants = {}, {}
    if any(call.keys() != calls[0].keys() for call in calls):
        raise Unknown("a call with other arguments in each run")
    for name, value in calls[0].items():
        pairs = [(call[name], layer) for call, layer in zip(calls, layers, strict=True)]
        names = layers[0] if renames else (name,)
        found = [n for n in names if all(n in of and of[n] is v for v, of in pairs)]
        if found:
            passed[name] = name if name in found else found[0]
        elif all(isinstance(v, PLAIN) and v == value for v, _ in pairs):
            constants[name] = value
        else:
            raise Unknown("a call with an argument of its own, or one that changes")
    return passed, constants


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal f32 numbers on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def numbers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu", dtype=torch.long)


def numbers_of(module: nn.Module) -> list[float]:
    """The numbers that the module may multiply by."""
    return [v for v in vars(module).values() if isinstance(v, float) and v not in (0.0, 1.0)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode; every training flag is put back."""
    training = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, was_training in training:
            m.training = was_training


@contextmanager
def telling_of_kernels(what: str) -> Iterator[None]:
    """Warns of a kernel that did not run inside, where runs that fail decide what is fused."""
    torch.ops.metalmm._take_failure()
    yield
    if why := torch.ops.metalmm._take_failure():
        reason = why.partition("\n")[0]
        warnings.warn(f"{what}: layers stay as they are for a failure: {reason}", stacklevel=4)

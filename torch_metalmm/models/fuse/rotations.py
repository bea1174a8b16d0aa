"""Modules that make cos and sin of positions as torch.ops.metalmm.rope_tables does: found by
running copies of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.fused import owner_of, unhooked
from ...nn.layer import positions as names_of
from ...nn.rotation import FusedRotation, Tables, is_plain, said_by
from .runs import Unknown, numbers

_FORMS = ((True, False), (True, True), (False, False))  # (twice, interleaved)
_FAR = 2**21  # behind every context, where frequencies that follow the length are others
_ROWS = 3  # rows of positions in models of pictures
_SUFFIX = "_inv_freq"
_NAMES = ["x", "position_ids", "layer_type"]  # arguments of FusedRotation.forward


def fuse_rotations(model: nn.Module) -> None:
    """Give each module that makes cos and sin of positions a forward of our op."""
    for module in model.modules():
        if module._modules or module._parameters or not module._buffers or not unhooked(module):
            continue
        if not all(is_plain(v) for _, v in said_by(module)):
            continue
        try:
            tables = {kind: _tables_of(module, kind) for kind in _kinds(module)}
        except Exception:  # Unknown, or a module that takes something else
            continue
        if tables:
            FusedRotation(module, tables).attach()


def tell_forms(model: nn.Module, angles: set[str]) -> None:
    """Let those modules know how the layers take cos and sin."""
    for owner in map(owner_of, model.modules()):
        if isinstance(owner, FusedRotation):
            owner.forms = frozenset(angles - {"whole", "none"})


def _kinds(module: nn.Module) -> list[Any]:
    """Values of the argument behind the positions, as buffers are named; None: no argument."""
    names = names_of(module)
    kinds = [n.removesuffix(_SUFFIX) for n in module._buffers if n.endswith(_SUFFIX)]
    if names == _NAMES[:2]:
        return [None]
    return [k for k in kinds if not k.endswith("original")] if names == _NAMES else []


def _tables_of(module: nn.Module, kind: Any) -> Tables:
    """Unknown: the module computes something else, or not from its frequencies as they are."""
    places = numbers(50, 2, 6)
    cases = [(p, t) for p in (places, places + _FAR, places) for t in (torch.float32, torch.half)]
    want = _results(module, kind, cases)
    for tables in _candidates(module, kind, want[1][0].dtype == torch.float32):
        inv_freq = _frequencies(module, tables.name)
        if all(_same(tables, inv_freq, *case, w) for case, w in zip(cases, want, strict=True)):
            return _with_axes(module, kind, tables)
    raise Unknown("cos and sin of another kind")


def _results(module: nn.Module, kind: Any, cases: list[tuple[Tensor, torch.dtype]]) -> list[Any]:
    """The results of one copy, whose frequencies may change from call to call, case by case."""
    trial, given = copy.deepcopy(module).cpu(), () if kind is None else (kind,)
    with torch.no_grad():
        return [trial(torch.zeros(2, 6, 4, dtype=t), p, *given) for p, t in cases]


def _frequencies(module: nn.Module, name: str) -> Tensor:
    found: Any = module._buffers[name]
    return found.detach().cpu()


def _candidates(module: nn.Module, kind: Any, keeps_float: bool) -> Iterator[Tables]:
    floats = dict.fromkeys((1.0, *(v for v in vars(module).values() if type(v) is float)))
    own = module._buffers if kind is None else [f"{kind}{_SUFFIX}"]
    buffers = [n for n in own if (b := module._buffers[n]) is not None and b.dim() == 1]
    for name, scale, (twice, interleaved) in product(buffers, floats, _FORMS):
        options = {"twice": twice, "interleaved": interleaved, "scale": scale}
        yield Tables(name, options, keeps_float)


def _same(tables: Tables, inv_freq: Tensor, places: Tensor, dtype: torch.dtype, want: Any) -> bool:
    """Whether the tables give `want` to the bit, dtypes included."""
    got = tables.of(inv_freq, places, dtype)
    return all(
        a.dtype == b.dtype and torch.equal(a, b.contiguous())
        for a, b in zip(got, want, strict=True)
    )


def _with_axes(module: nn.Module, kind: Any, tables: Tables) -> Tables:
    """The tables with axes for positions [A, B, S], where the module takes such."""
    places = numbers(1000, _ROWS, 2, 6, seed=1) * 1000 + torch.arange(_ROWS).view(-1, 1, 1)
    inv_freq = _frequencies(module, tables.name)
    try:
        [(cos, sin)] = _results(module, kind, [(places, torch.float32)])
    except Exception:
        return tables
    if cos.dim() != 3:  # a table for each row of positions
        return tables
    axes = inv_freq.new_zeros(len(inv_freq), dtype=torch.int64)
    for axis in range(_ROWS):
        rows = tables.of(inv_freq, places[axis], torch.float32)
        same = torch.stack([(a == b).all(0).all(0) for a, b in zip((cos, sin), rows, strict=True)])
        column = torch.arange(len(inv_freq)) * (2 if tables.options["interleaved"] else 1)
        axes[same.all(0)[column]] = axis
    found = replace(tables, axes=axes, rows=_ROWS)
    return found if _same(found, inv_freq, places, torch.float32, (cos, sin)) else tables

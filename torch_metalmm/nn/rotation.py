"""The rotation of heads by positions in one op: cos and sin of a model's own frequencies."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Settings
from .stand_in import StandIn

_rope_tables = torch.ops.metalmm.rope_tables.default
_KINDS = (str, list, dict)  # of what a module says: how it scales, sections of frequencies


@dataclass
class Tables:
    """What a module computes of positions [B, S]: (cos, sin) as torch.ops.metalmm.rope_tables.

    name: the buffer of frequencies. keeps_float: results are f32, else of x's dtype. axes: of
    positions [A, B, S], the one that a frequency takes; None where there are none such.
    """

    name: str
    options: dict[str, Any]
    keeps_float: bool
    axes: Tensor | None = None
    rows: int = 1  # A

    def of(self, inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        axes = self.axes if positions.dim() == 3 else None
        if axes is not None and axes.device != positions.device:
            axes = self.axes = axes.to(positions.device)
        dtype = torch.float32 if self.keeps_float else dtype
        if self.options["twice"] or torch.compiler.is_compiling():
            return _rope_tables(positions, inv_freq, axes, **self.options, dtype=dtype)
        given = self.options | {"twice": True}
        with torch.inference_mode(False), torch.no_grad():  # whose writes are counted
            cos, sin = _rope_tables(positions, inv_freq, axes, **given, dtype=dtype)
            return _half_of(cos), _half_of(sin)


class FusedRotation(StandIn):
    """The forward of a module that makes cos and sin.

    tables: {the argument behind the positions, None without one: Tables}. The frequencies are read
    at every call. The class's own forward computes where one of the arguments is of another kind,
    and once a number, a list or a name of the module is not what fuse_ saw. What its config says is
    not compared: transformers' modules read that when they are made.
    """

    def __init__(self, module: nn.Module, tables: dict[Any, Tables]) -> None:
        super().__init__(module)
        self.tables = tables
        self._settings = Settings([module])
        self._said = copy.deepcopy(said_by(module))

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: Any = None) -> Any:
        module, tables = self.module, self.tables.get(layer_type)
        inv_freq = None if tables is None else module._buffers.get(tables.name)
        if (
            tables is None
            or inv_freq is None
            or inv_freq.dtype != torch.float32
            or inv_freq.requires_grad
            or position_ids.dtype != torch.int64
            or not inv_freq.device == position_ids.device == x.device
            or not (position_ids.dim() == 2 or (*position_ids.shape[:-2],) == (tables.rows,))
            or (position_ids.dim() == 3 and tables.axes is None)
            or not self._same()
        ):
            given = () if layer_type is None else (layer_type,)
            return self.original(x, position_ids, *given)
        return tables.of(inv_freq, position_ids, x.dtype)

    def _same(self) -> bool:
        """Whether the module is what fuse_ saw, but for its tensors."""
        own = self.module.__dict__
        return self._settings.same() and all(own.get(n) == v for n, v in self._said)


def said_by(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module says of itself beside numbers."""
    return [(n, v) for n, v in vars(module).items() if isinstance(v, _KINDS) and n[0] != "_"]


def is_plain(value: Any) -> bool:
    """Whether == of such values is a bool: numbers, texts, functions, lists and dicts of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, str | int | float) or callable(value)


def _half_of(wide: Tensor) -> Tensor:
    """The first half of rows that hold it twice, which knows them: see _twice."""
    half: Any = wide[..., : wide.shape[-1] // 2]
    half.held_twice = wide, wide._version
    return half


def _twice(t: Tensor) -> Tensor:
    """Rows of t beside themselves: those that t is a view of, unless they were written since."""
    if not torch.compiler.is_compiling():
        wide, version = getattr(t, "held_twice", (None, 0))
        if wide is not None and wide._version == version:
            return wide
    return torch.cat((t, t), -1)


def tables(angles: str, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as the op takes them."""
    if angles == "whole":
        return cos, sin
    if angles == "none":
        return cos[..., :0], sin[..., :0]
    if angles == "back":
        return cos, -sin
    if angles == "twice":
        return _twice(cos), _twice(sin)
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


def no_angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin that rotate nothing of x [batch, length, size]."""
    nothing = x.new_empty(1, x.shape[1], 0)
    return nothing, nothing

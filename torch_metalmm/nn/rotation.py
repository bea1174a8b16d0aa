"""The rotation of heads by positions in one op: cos and sin of a model's own frequencies."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .settings import Settings
from .stand_in import StandIn

_rope_tables = torch.ops.metalmm.rope_tables.default
_ALIGNED = 8  # columns of f16 in 16 bytes, at which kernels find rows
_KINDS = (str, list, dict)  # types of a module's settings: scaling, sections of frequencies


@dataclass
class Tables:
    """A module's (cos, sin) for positions [B, S], as torch.ops.metalmm.rope_tables makes them.

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
            wide = _rope_tables(positions, inv_freq, axes, **given, dtype=dtype)
            cos, sin = (t[..., : t.shape[-1] // 2] for t in wide)
            return _with_forms({"whole": (cos, sin), "twice": wide})

    def columns(self, inv_freq: Tensor) -> Tensor:
        """The frequency of each column of cos."""
        if not self.options["twice"]:
            return inv_freq
        interleaved = self.options["interleaved"]
        return inv_freq.repeat_interleave(2) if interleaved else torch.cat((inv_freq, inv_freq))


class _Laid(NamedTuple):
    """The columns of all kinds and forms side by side, for one op.

    of: the buffers that they are made of, and their versions. places: {kind: {form: its columns}}.
    """

    of: tuple[tuple[Tensor, int], ...]
    forms: frozenset[str]
    inv_freq: Tensor
    places: dict[Any, dict[str, slice]]


class _Made(NamedTuple):
    """The pairs (cos, sin) that a call has computed for the other kinds."""

    positions: Tensor
    version: int
    dtype: torch.dtype
    pairs: dict[Any, tuple[Tensor, Tensor]]


class FusedRotation(StandIn):
    """The forward of a module that makes cos and sin.

    tables: {the argument behind the positions, None without one: Tables}. The frequencies are read
    at every call, or, where a copy of them is laid out, their versions. The class's own forward
    computes where one of the arguments is of another kind, and once a number, a list or a name of
    the module is not what fuse_ saw. What its config says is not compared: transformers' modules
    read that when they are made.
    forms: how layers take cos and sin beside "whole", see Heads. Of one position all kinds and
    forms are made in one op, and each kind is taken once.
    """

    def __init__(self, module: nn.Module, tables: dict[Any, Tables]) -> None:
        super().__init__(module)
        self.tables = tables
        self.forms: frozenset[str] = frozenset()
        self._settings = Settings([module])
        self._said = copy.deepcopy(said_by(module))
        self._laid: _Laid | None = None
        self._made: _Made | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_laid": None, "_made": None}

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
        laid = self._all()  # here, so that a prompt makes it and not the step that is recorded
        if laid is None or position_ids.dim() != 2 or position_ids.numel() != 1:
            return tables.of(inv_freq, position_ids, x.dtype)
        return self._of_all(laid, layer_type, position_ids, x.dtype)

    def _all(self) -> _Laid | None:
        """The columns of all kinds and forms; None: there is one, or they are not for one op."""
        if torch.compiler.is_compiling() or not (len(self.tables) > 1 or self.forms - {"twice"}):
            return None
        buffers: list[Any] = [self.module._buffers.get(t.name) for t in self.tables.values()]
        if any(b is None or b.is_inference() or b.requires_grad for b in buffers):
            return None
        laid = self._laid
        if (
            laid is None
            or laid.forms != self.forms
            or any(
                b is not t or b._version != v for b, (t, v) in zip(buffers, laid.of, strict=True)
            )
        ):
            with torch.inference_mode(False), torch.no_grad():
                laid = self._laid = _laid(self.tables, self.forms, buffers)
        return laid if laid.places else None

    def _of_all(
        self, laid: _Laid, kind: Any, positions: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of one position, which the call for the first kind computes for all."""
        made = self._made
        if (
            made is not None
            and made.positions is positions
            and made.dtype is dtype
            and made.version == positions._version
            and (pair := made.pairs.pop(kind, None)) is not None
        ):
            return pair
        tables = self.tables[kind]
        options = {"twice": False, "scale": tables.options["scale"]}
        options["dtype"] = torch.float32 if tables.keeps_float else dtype
        with torch.inference_mode(False), torch.no_grad():  # whose writes are counted
            cos, sin = _rope_tables(positions, laid.inv_freq, None, **options)
            pairs = {
                of: _with_forms({f: (cos[..., at], sin[..., at]) for f, at in places.items()})
                for of, places in laid.places.items()
            }
        pair = pairs.pop(kind)
        if pairs and not positions.is_inference():
            self._made = _Made(positions, positions._version, dtype, pairs)
        return pair

    def _same(self) -> bool:
        """Whether the module is what fuse_ saw, but for its tensors."""
        own = self.module.__dict__
        return self._settings.same() and all(own.get(n) == v for n, v in self._said)


def said_by(module: nn.Module) -> list[tuple[str, Any]]:
    """The texts, lists and dicts among a module's attributes, but for private ones."""
    return [(n, v) for n, v in vars(module).items() if isinstance(v, _KINDS) and n[0] != "_"]


def is_plain(value: Any) -> bool:
    """Whether == of such values is a bool: numbers, texts, functions, lists and dicts of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, str | int | float) or callable(value)


def _laid(tables: dict[Any, Tables], forms: frozenset[str], buffers: list[Tensor]) -> _Laid:
    """No places where one op does not make all kinds, or a column would begin at any byte."""
    rows: list[Tensor] = []
    places: dict[Any, dict[str, slice]] = {}
    end = 0
    for (kind, of), buffer in zip(tables.items(), buffers, strict=True):
        row = of.columns(buffer)
        for form in ("whole", *sorted(forms)):
            rows.append(row if form == "whole" else _turned(form, row))
            places.setdefault(kind, {})[form] = slice(end, end + len(rows[-1]))
            end += len(rows[-1])
    kinds = {(t.options["scale"], t.keeps_float) for t in tables.values()}
    alike = {(b.dtype, b.device) for b in buffers} == {(torch.float32, buffers[0].device)}
    if len(kinds) > 1 or not alike or any(len(row) % _ALIGNED for row in rows):
        rows, places = rows[:1], {}
    return _Laid(tuple((b, b._version) for b in buffers), forms, torch.cat(rows), places)


def _with_forms(forms: dict[str, tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """cos and sin of the form "whole", which know the others: see tables."""
    cos, sin = forms.pop("whole")
    for i, t in enumerate((cos, sin)):
        t.forms = {form: (pair[i], t._version) for form, pair in forms.items()}
    return cos, sin


def _form(angles: str, t: Tensor) -> Tensor:
    """A form of t: what was made beside t, unless it was written since."""
    if not torch.compiler.is_compiling():
        made, version = getattr(t, "forms", {}).get(angles, (None, 0))
        if made is not None and made._version == version:
            return made
    return _turned(angles, t)


def _turned(angles: str, t: Tensor) -> Tensor:
    """The table cos or sin in the form `angles`, or the angles themselves."""
    if angles == "back":
        return -t
    if angles == "twice":
        return torch.cat((t, t), -1)
    return t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1)


def tables(angles: str, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as the op takes them."""
    if angles == "whole":
        return cos, sin
    if angles == "none":
        return cos[..., :0], sin[..., :0]
    return cos if angles == "back" else _form(angles, cos), _form(angles, sin)


def no_angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin that rotate nothing of x [batch, length, size]."""
    nothing = x.new_empty(1, x.shape[1], 0)
    return nothing, nothing

"""How packed layers on the CPU read their input: exactly, or rounded in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .. import _C, formats
from ..formats.activations import TOP_CODES

_native: Any = _C  # mypy does not see into the module
KINDS = tuple(TOP_CODES)

_changes = [0]


def check_kind(kind: object, where: str = "activations") -> None:
    """ValueError that names `where`, what was given and what is allowed."""
    if kind is not None and kind not in KINDS:
        allowed = ", ".join(map(repr, KINDS))
        raise ValueError(f"{where}: {kind!r}; allowed: None, {allowed}")


def takes_rounded(format: str) -> bool:
    """Whether the products of the format can round their input: it has integer codes."""
    return bool(_native.has_integer_codes(formats.get(format).name))


class Activations:
    """The base of layers that have the setting, which set_activations writes."""

    _activations: str | None = None

    @property
    def activations(self) -> str | None:
        return self._activations


def set_activations(layer: Any, kind: str | None) -> None:
    """Sets how one layer reads its input. A part of a merged layer sets it for the whole layer."""
    owner = getattr(layer, "merged", layer)
    if owner._activations != kind:
        owner._activations = kind
        _changes[0] += 1


def of_call(kind: str | None, x: Tensor) -> dict[str, str]:
    """The keyword arguments that a call of an op on x has for the setting."""
    return {"activations": kind} if kind and x.is_cpu else {}


def changes() -> int:
    """How often the setting of any layer changed: what was derived from it is old since."""
    return _changes[0]


@contextmanager
def exactly(model: nn.Module) -> Iterator[None]:
    """The layers of the model read their input exactly; then again as before, by their names.

    Rounded in blocks, two inputs that differ by the rounding of f32 may differ by half a step.
    """
    kinds = {n: m.activations for n, m in model.named_modules() if isinstance(m, Activations)}
    asked = {name: kind for name, kind in kinds.items() if kind is not None}
    for name in asked:
        set_activations(model.get_submodule(name), None)
    try:
        yield
    finally:
        for name, kind in asked.items():
            set_activations(model.get_submodule(name), kind)

"""Whether a layer's modules are what fuse_ saw, and nothing is called beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from .fused import PLAIN, FusedMLP, owner_of
from .hidden import is_ours
from .linear import QuantLinear
from .router import FusedRouter
from .settings import Settings

_CAPTURING = "transformers.utils.output_capturing"


class Watch:
    """The modules below a layer.

    `same` is cheap: torch counts the hooks that are registered anywhere, children are compared by
    identity, and what is set on a module or taken from it changes the size of one of its dicts;
    Settings compares their numbers and the code of their classes. Where one of these is another,
    `plain` looks at each module.
    """

    def __init__(
        self,
        layer: nn.Module,
        called: Iterable[nn.Module] = (),
        ordered: Iterable[nn.Module] = (),
    ) -> None:
        """called: modules that the fused layer calls as they are, with their hooks. ordered: those
        whose input_order it follows, if they have one."""
        self.layer, self.ordered = layer, frozenset(ordered)
        within = {m for module in called for m in module.modules()}
        self.modules = [m for m in layer.modules() if m is not layer and m not in within]
        parents = [m for m in (layer, *self.modules) if m._modules]
        # A parametrization takes a weight away and gives its module a child.
        self.names = [(m, (*m._parameters,), (*m._modules,)) for m in self.modules]
        self.children = [(m, tuple(m._modules.values())) for m in parents]
        stood_in = [m.gated.module for m in self.modules if isinstance(m, FusedMLP)]
        self.settings = Settings([layer, *self.modules, *stood_in])
        self._forget()

    def _forget(self) -> None:
        """Empties the state derived from the modules' own dicts, which are others in a copy."""
        self._dicts: list[dict[str, Any]] = []
        self._families: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._buffers: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._hooks = -1
        self.captured: frozenset[str] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("layer", "ordered", "modules", "children", "names", "settings")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def same(self) -> bool:
        """Whether nothing has changed since `plain` said yes."""
        if RemovableHandle.next_id != self._hooks or [*map(len, self._dicts)] != self._sizes:
            return False
        for children, seen in self._families:
            if tuple(children.values()) != seen:  # compares modules by identity
                return False
        for buffers in self._buffers:
            if buffers["input_order"] is not None:  # a state dict brought one
                return False
        if not self.settings.same():
            return False
        return not self.captured or not _collected(self.captured)

    def plain(self) -> bool:
        """Whether calling the modules is calling the forwards of their classes."""
        self._hooks = -1
        if not self.settings.same():
            return False
        for parent, seen in self.children:
            if tuple(parent._modules.values()) != seen:
                return False
        for module, parameters, names in self.names:
            if (*module._parameters,) != parameters or (*module._modules,) != names:
                return False
        captured: set[str] = set()
        for module in self.modules:
            if _forward_is_set(module) or not hooks_are_known(module, captured):
                return False
            follows = not isinstance(module, QuantLinear) or module in self.ordered
            if not follows and module._buffers["input_order"] is not None:
                return False
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        if not torch.compiler.is_compiling():
            of_modules = [(m.__dict__, m._parameters, m._modules) for m in self.modules]
            self._dicts = [each for dicts in of_modules for each in dicts]
            self._families = [(m._modules, seen) for m, seen in self.children]
            self._sizes = [*map(len, self._dicts)]
            packed = [m for m in self.modules if type(m) in PLAIN and m not in self.ordered]
            self._buffers = [m._buffers for m in packed]
            self._hooks = RemovableHandle.next_id
            self.captured = frozenset(captured)
        return not captured or not _collected(captured)


def _collected(keys: Any) -> bool:
    """Whether transformers collects one of these outputs of modules in this forward."""
    collector = sys.modules[_CAPTURING]._active_collector.get()
    return collector is not None and any(key in collector for key in keys)


def _forward_is_set(module: nn.Module) -> bool:
    """Whether the module has another forward than its class."""
    if "forward" not in module.__dict__:
        return False
    if isinstance(owner_of(module), FusedRouter):
        return False  # an op, which a fused layer calls itself
    return getattr(module.__dict__["forward"], "__func__", None) is not type(module).forward


def hooks_are_known(module: nn.Module, captured: set[str]) -> bool:
    """Whether the module has at most hooks that do nothing where the module is not called.

    That of LastHidden, and those with which transformers collects outputs of modules, once somebody
    has asked for some; what they collect is added to `captured`.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if is_ours(hook):
            continue
        if getattr(hook, "__module__", None) != _CAPTURING or hook.__closure__ is None:
            return False
        cells = zip(hook.__code__.co_freevars, hook.__closure__, strict=True)
        keys = [cell.cell_contents for name, cell in cells if name == "key"]
        if len(keys) != 1:
            return False
        captured.add(keys[0])
    return True

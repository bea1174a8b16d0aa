"""Which ops a model calls for a token, in its layers and beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """The ops of ours that are called, and others that launch a kernel, but for those `aside`."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[str] = []
        self.others: list[str] = []
        self.of_layers: list[tuple[list[str], list[str]]] = []
        self.beside: list[str] = []  # before the layer that came last
        self.aside = False
        self.hooks: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name.split("::")[1]
        view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
        )
        if op.namespace == "metalmm":
            self.ours.append(name)
        elif not view and name not in ("_unsafe_view", "new_empty") and not self.aside:
            self.others.append(name)
        return op(*args, **(kwargs or {}))

    def uncounted(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.aside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.aside = False

        return call

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Let of_layers have what each call of a layer calls: (ours, others)."""

        def begin(*_: Any) -> None:
            self.beside += self._taken()

        def end(*_: Any) -> None:
            self.of_layers.append((self.ours, self.others))
            self._taken()

        for layer in layers:
            self.hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]

    def unwatch(self) -> None:
        """The layers have their own hooks alone again."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _taken(self) -> list[str]:
        """The ops called since the last layer."""
        called = self.ours + self.others
        self.ours, self.others = [], []
        return called

    def outside(self) -> list[str]:
        """The ops called in no layer that is watched."""
        return self.beside + self.ours + self.others

"""A forward that ends before its end: a client may be gone, and a long text takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Stopped(Exception):
    """Nobody waits for what is computed."""


@contextmanager
def stoppable(model: nn.Module, is_over: Callable[[], bool]) -> Iterator[None]:
    """Look before each layer of the model's stacks whether it is over. Stopped: it is."""

    def look(*_: Any) -> None:
        if is_over():
            raise Stopped

    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    hooks = [layer.register_forward_pre_hook(look) for stack in stacks for layer in stack]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

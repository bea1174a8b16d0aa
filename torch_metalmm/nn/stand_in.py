"""A forward that computes in place of a module's own, while the module stays in the model."""

from __future__ import annotations

from typing import Any

from torch import nn


class StandIn:
    """The forward of `module`, which stays the object that it was, in place of its class's."""

    forward: Any

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def attach(self) -> None:
        self.module.__dict__["forward"] = self.forward

    def detach(self) -> None:
        del self.module.__dict__["forward"]

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the class's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

"""A step of a model as a transaction: all layers of a cache get its entries, or none keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .slots import lasting


class Transaction:
    """The writes of one step, shared by the layers of a cache.

    A layer begins before it writes. Where a layer that has begun begins again, the step before has
    ended: it counts if every layer that wrote in the last step that counts wrote in this one, too;
    else its entries are forgotten. Until then the cache has the length of before. An exception that
    code of ours sees calls undo() at once, also in a first step, whose layers nobody knows yet.

    Layers of fixed slots share their length, a tensor for each device.
    """

    def __init__(self) -> None:
        self.begun: list[Any] = []  # the layers, with the length before in their `before`
        self.members: dict[Any, None] = {}  # the layers of the last step that counts
        # {device: [the last slot that is filled, the number of these]}: a token's slot and length
        # are what one addition leaves.
        self.lengths: dict[torch.device, Tensor] = {}
        self.advanced: dict[torch.device, tuple[int, Tensor]] = {}  # in this step: entries, slots

    def begin(self, layer: Any) -> None:
        """ValueError: the layer's entries are not those of the layers that wrote before it."""
        if torch.compiler.is_compiling():  # a graph is one for all steps
            return
        if layer.before is not None:
            self.settle()
        before = layer.position()
        # The length of fixed slots is known only after waiting for the device.
        late = layer.is_compileable and self.members and layer not in self.members
        if self.begun and (late or before != self.begun[0].before):
            raise ValueError(
                f"PackedCache: this layer has entries of {before} positions, those before it of "
                f"{self.begun[0].before}, since a step failed; call reset()"
            )
        layer.before = before
        self.begun.append(layer)

    def is_open(self) -> bool:
        """Whether layers of the step have not written yet."""
        if torch.compiler.is_compiling() or not self.begun:
            return False
        return any(layer.before is None for layer in self.members)

    def settle(self) -> None:
        """The step has ended."""
        if self.is_open():
            self.undo()
        elif self.begun:
            self.members = dict.fromkeys(self.begun)
            self._end()

    def undo(self) -> None:
        """The layers have the entries that they had before the step."""
        for layer in self.begun:
            layer.rewind(layer.before)
        for device, (count, _) in self.advanced.items():
            self.lengths[device].sub_(count)
        self._end()

    def _end(self) -> None:
        for layer in self.begun:
            layer.before = None
        self.begun = []
        self.advanced.clear()

    def forget(self) -> None:
        """Forget all entries."""
        self._end()
        self.members = {}

    # ---- the length of fixed slots

    def length_on(self, device: torch.device) -> tuple[Tensor, bool]:
        """(the tensor of the device, whether it is new)."""
        found = self.lengths.get(device)
        if found is not None:
            return found, False
        with lasting():
            self.lengths[device] = torch.arange(-1, 1, device=device)
        return self.lengths[device], True

    def advance(self, device: torch.device, count: int) -> Tensor:
        """The slots of `count` entries more, of which the first layer of a step makes room."""
        found = self.advanced.get(device)
        if found is None:
            found = self.advanced[device] = count, advanced(self.lengths[device], count)
        if found[0] != count:
            raise ValueError(f"PackedCache: {count} entries; the layers before got {found[0]}")
        return found[1]


def advanced(last_and_length: Tensor, count: int) -> Tensor:
    """The slots of `count` entries more, which the length counts from here on."""
    if count == 1:
        return last_and_length.add_(1)[:1]
    slots = torch.arange(count, device=last_and_length.device) + last_and_length[1]
    last_and_length.add_(count)
    return slots

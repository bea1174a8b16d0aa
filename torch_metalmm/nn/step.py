"""The tensors and options that the attention layers of a model share in one forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recipe import Heads
from .rotation import no_angles, tables

_OF_SDPA = {"dropout", "scaling", "sliding_window", "softcap"}


class Held(NamedTuple):
    """The tensors and options that the layers of a step share: see Step.

    versions: of `given`; None where cos and sin are those tensors, and where they have none.
    direct, options: see Step.direct and Step.op. growth: of q, as Growth has it of positions.
    """

    given: tuple[Any, Any] = (None, None)  # the model's cos and sin
    versions: tuple[int, int] | None = None
    name: Any = None  # name of the function in the config
    cos: Any = None  # cos and sin for the op
    sin: Any = None
    function: Any = None  # the function that computes attention
    direct: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    positions: Any = None
    growth: tuple[Tensor, float] | None = None

    def grown(self, q: Tensor) -> Tensor:
        if self.growth is None:
            return q
        logarithms, rate = self.growth
        return torch.addcmul(q, q, logarithms, value=rate)


class Step:
    """The Held that layers which rotate and attend alike share in a forward; the first computes it.

    A forward is known by its cos and sin, which the model makes anew each time: `held` keeps these
    tensors, so no others get their identity. Two threads replace each other's `held`, each as a
    whole.
    """

    def __init__(self, heads: Heads) -> None:
        self.attend, self.angles, self.growth = heads.attend, heads.angles, heads.growth
        self.groups = heads.heads // max(heads.kv_heads, 1)
        self.like_k = torch.empty(0, heads.head_size, device="meta")
        self.held = Held()

    @staticmethod
    def key(heads: Heads) -> object:
        """Equal for layers that may share a step."""
        attend = heads.attend
        growth = None if heads.growth is None else heads.growth.key()
        sizes = (heads.angles, heads.head_size, heads.heads, heads.kv_heads, growth)
        constants = tuple(sorted(attend.constants.items()))
        names = (*attend.place, *sorted(attend.passed), *attend.own.items())
        return (*sizes, *names, attend.default, id(attend.config), constants)

    def of(self, cos: Tensor, sin: Tensor, positions: Tensor | None, x: Tensor) -> Held:
        """The Held of these tensors; the first layer that asks makes it. positions: of `growth`."""
        held, versions = self.held, self.held.versions
        if (
            held.given[0] is cos
            and held.given[1] is sin
            and held.positions is positions
            and held.name == self.attend.name()
            and (versions is None or versions == (cos._version, sin._version))
        ):
            return held
        function = self.attend.function()
        fixed = self.angles in ("whole", "none") or cos.is_inference() or sin.is_inference()
        versions = None if fixed else (cos._version, sin._version)
        given = ((cos, sin), versions, self.attend.name(), *tables(self.angles, cos, sin))
        of_q = positions, self._grown(positions, x)
        held = Held(*given, function, self.direct(function), self.op(function), *of_q)
        self.held = held
        return held

    def _grown(self, positions: Tensor | None, x: Tensor) -> tuple[Tensor, float] | None:
        """The growth of q, for an x of this dtype."""
        if self.growth is None or positions is None:
            return None
        return self.growth.of(positions, x.dtype)

    def still(self, x: Tensor, positions: Tensor | None) -> Held:
        """The Held of an x [batch, length, size] that is not rotated."""
        cos = self.held.given[0]
        same = cos is not None and cos.dtype == x.dtype and cos.device == x.device
        if not same or cos.shape[1] != x.shape[1]:
            cos, _ = no_angles(x)
        return self.of(cos, cos, positions, x)

    def made(self, cos: Tensor, sin: Tensor, positions: Tensor | None, x: Tensor) -> Held:
        """The Held of these tensors, made anew and not kept, with the attention function itself."""
        function = self.attend.function()
        angles = tables(self.angles, cos, sin)
        of_q = positions, self._grown(positions, x)
        return Held((None, None), None, None, *angles, function, None, self.op(function), *of_q)

    def op(self, function: Callable[..., Any]) -> dict[str, Any] | None:
        """The options of our op `attention`, if that is what the function calls."""
        options = getattr(function, "op_options", None)
        if options is None:
            return None
        attend = self.attend
        return options(attend.constants, attend.passed, attend.own)

    def direct(self, function: Callable[..., Any]) -> dict[str, Any] | None:
        """With which options transformers' function for sdpa calls torch's for one token, no mask.

        None: it is another function, or does more than to call torch's.
        """
        theirs = sys.modules.get("transformers.integrations.sdpa_attention")
        if theirs is None or function is not theirs.sdpa_attention_forward:
            return None
        options = self.attend.constants
        if self.attend.own or not options.keys() <= _OF_SDPA:
            return None
        if options.get("softcap") is not None or options.get("scaling") is None:
            return None
        direct: dict[str, Any] = {"dropout_p": options.get("dropout", 0.0)}
        direct["scale"] = options["scaling"]
        if self.groups > 1:
            if not theirs.use_gqa_in_sdpa(None, self.like_k, self.like_k):
                return None
            direct["enable_gqa"] = True
        return direct

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": Held()}

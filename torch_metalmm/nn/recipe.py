"""What a decoder layer computes, in terms of our ops: models/fuse writes it, layer.py runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fused import GatedMLP


@dataclass
class Norm:
    """x * rsqrt(mean(x²) + eps) * (offset + weight). name: the weight's, "" for no weight."""

    module: nn.Module
    name: str
    eps: float
    offset: float

    def weight(self) -> Tensor | None:
        return self.module._parameters.get(self.name)


@dataclass
class Output:
    """How a branch ends: residual + scale * post(linear(x)). linear None: of x itself."""

    linear: Any
    post: Norm | None
    scale: float


_IMPLEMENTATION = ("_attn_implementation_internal", "_attn_implementation")


@dataclass
class Attend:
    """How the layer's attention calls the function that its config names.

    place: module and name of the interface that has the functions. It is looked up there, since a
    copy would not get the functions that are registered later. default: for what it has not.
    """

    place: tuple[str, str]
    default: Callable[..., Any]
    config: Any
    constants: dict[str, Any]  # keyword arguments that are the same in every call
    passed: tuple[str, ...]  # those that are the layer's own, by the same names

    def __post_init__(self) -> None:
        self.interface = getattr(import_module(self.place[0]), self.place[1])
        # A config's own attributes take four times as long as those of its dict: 120 ns.
        self.said = vars(self.config)
        self.key = next(name for name in _IMPLEMENTATION if name in self.said)

    def name(self) -> Any:
        """What the config says of the function."""
        return self.said[self.key]

    def __getstate__(self) -> dict[str, Any]:
        derived = ("interface", "said", "key")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = self.interface.get_interface(
            self.config._attn_implementation, self.default
        )
        return found


@dataclass
class Recipe:
    """A layer as ops. The layer's first argument is x [batch, length, size], the others have names.

    projections: one layer for q, k and v; or one for q and k, one for v; or three.
    mlp: gate and up, whose down is in `down`; or the module, called as it is, whatever it computes.
    angles: "whole", cos and sin as they are given; "halves", each value of their first half twice;
    "none", nothing is rotated.
    """

    attention: nn.Module
    names: frozenset[str]  # the keyword arguments that the layer was seen to take
    embeddings: str  # which of them is (cos, sin)
    mask: str | None
    cache: str
    number: int | None  # the layer's in the cache; None: attention.layer_idx, which may change
    attend: Attend
    heads: int
    kv_heads: int
    head_size: int
    pre: Norm | None
    projections: tuple[Any, ...]
    head_norms: tuple[Norm, Norm] | None  # of each head of q and k, before the rotation
    whole_norms: tuple[Norm, Norm] | None  # of q and k over all heads, before the rotation
    interleaved: bool
    angles: str
    output: Output
    pre_mlp: Norm | None
    mlp: GatedMLP | nn.Module
    down: Output

    def norms(self) -> list[Norm]:
        pairs = (*(self.head_norms or ()), *(self.whole_norms or ()))
        every = (self.pre, *pairs, self.output.post, self.pre_mlp, self.down.post)
        return [norm for norm in every if norm is not None]

    def linears(self) -> list[Any]:
        """The linear layers that our ops compute."""
        gated = self.mlp.layers()[:2] if isinstance(self.mlp, GatedMLP) else ()
        every = (*self.projections, *gated, self.output.linear, self.down.linear)
        return [layer for layer in every if layer is not None]


def tables(angles: str, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as the op takes them."""
    if angles == "whole":
        return cos, sin
    if angles == "none":
        return cos[..., :0], sin[..., :0]
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


class Held(NamedTuple):
    """What the layers of a step share: see Step.

    versions: of `given`; None where cos and sin are those tensors, and where they have none.
    direct, options: see Step.direct and Step.op.
    """

    given: tuple[Any, Any] = (None, None)  # the model's cos and sin
    versions: tuple[int, int] | None = None
    name: Any = None  # of the function in the config
    cos: Any = None  # cos and sin for the op
    sin: Any = None
    function: Any = None  # that computes attention
    direct: dict[str, Any] | None = None
    options: dict[str, Any] | None = None


class Step:
    """What layers that rotate and attend alike share in one forward; the first computes it.

    A forward is known by its cos and sin, which the model makes anew each time: `held` keeps these
    tensors, so no others get their identity. Two threads replace each other's `held`, each as a
    whole.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.attend, self.angles = recipe.attend, recipe.angles
        self.groups = recipe.heads // recipe.kv_heads
        self.like_k = torch.empty(0, recipe.head_size, device="meta")
        self.held = Held()

    @staticmethod
    def key(recipe: Recipe) -> object:
        """Equal for recipes that may share a step."""
        attend = recipe.attend
        sizes = (recipe.angles, recipe.head_size, recipe.heads, recipe.kv_heads)
        constants = tuple(sorted(attend.constants.items()))
        names = (*attend.place, *sorted(attend.passed))
        return (*sizes, *names, attend.default, id(attend.config), constants)

    def of(self, cos: Tensor, sin: Tensor) -> Held:
        """What is held for these; the first layer that asks makes it."""
        held, versions = self.held, self.held.versions
        if (
            held.given[0] is cos
            and held.given[1] is sin
            and held.name == self.attend.name()
            and (versions is None or versions == (cos._version, sin._version))
        ):
            return held
        function = self.attend.function()
        fixed = self.angles != "halves" or cos.is_inference() or sin.is_inference()
        versions = None if fixed else (cos._version, sin._version)
        given = ((cos, sin), versions, self.attend.name(), *tables(self.angles, cos, sin))
        held = Held(*given, function, self.direct(function), self.op(function))
        self.held = held
        return held

    def op(self, function: Callable[..., Any]) -> dict[str, Any] | None:
        """The options of our op `attention`, if that is what the function calls."""
        options = getattr(function, "op_options", None)
        if options is None:
            return None
        found: dict[str, Any] | None = options(self.attend.constants, self.attend.passed)
        return found

    def direct(self, function: Callable[..., Any]) -> dict[str, Any] | None:
        """With which options transformers' function for sdpa calls torch's for one token, no mask.

        None: it is another function, or does more than to call torch's.
        """
        theirs = sys.modules.get("transformers.integrations.sdpa_attention")
        if theirs is None or function is not theirs.sdpa_attention_forward:
            return None
        options = self.attend.constants
        if not options.keys() <= {"dropout", "scaling", "sliding_window", "softcap"}:
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

"""The ops that a decoder layer computes: models/fuse writes it, layer.py runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from .fused import GatedMLP
from .mixture import Mixture


@dataclass
class Norm:
    """x * rsqrt(mean(x²) + eps) * (offset + weight). name: the weight's, "" for no weight.

    groups: parts of a row, each with a mean of its own.
    """

    module: nn.Module
    name: str
    eps: float
    offset: float
    size: int
    groups: int = 1
    _ones: Any = field(default=None, compare=False, repr=False)

    def weight(self) -> Tensor | None:
        return self.module._parameters.get(self.name)

    def factors(self, x: Tensor) -> Tensor | None:
        """The weight; ones of x's dtype where there is none, for an op that else takes no norm."""
        if self.name:
            return self.weight()
        ones = self._ones
        if ones is None or ones.dtype != x.dtype or ones.device != x.device:
            ones = self._ones = x.new_ones(self.size)
        return ones


@dataclass
class Output:
    """How a branch ends: residual + scale * post(linear(x)). linear None: of x itself."""

    linear: Any
    post: Norm | None = None
    scale: float = 1.0
    joins: bool = True  # False: there is no residual


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
    passed: tuple[str, ...]  # the layer's own arguments, by the same names
    own: dict[str, str]  # {keyword argument: the parameter of the attention that it is}

    def __post_init__(self) -> None:
        self.interface = getattr(import_module(self.place[0]), self.place[1])
        # A config's own attributes take four times as long as those of its dict: 120 ns.
        self.said = vars(self.config)
        self.key = next(name for name in _IMPLEMENTATION if name in self.said)

    def name(self) -> Any:
        """The function's name in the config."""
        return self.said[self.key]

    def __getstate__(self) -> dict[str, Any]:
        derived = ("interface", "said", "key")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def function(self) -> Callable[..., Any]:
        return self.interface.get_interface(self.config._attn_implementation, self.default)


class _Ordered:
    """A core that takes the results of its projections in an order of its own."""

    order: Tensor | None
    factors: Tensor | None

    def factors_of(self, x: Tensor, layers: tuple[Any, ...]) -> Sequence[Tensor | None]:
        """The factors of the layers' results for x, in x's dtype."""
        factors = self.factors
        if factors is None:
            return [None] * len(layers)
        if factors.dtype != x.dtype or factors.device != x.device:
            factors = self.factors = factors.to(x)
        return torch.split(factors, [layer.weight.shape[0] for layer in layers])

    def arranged(self, parts: list[Tensor]) -> list[Tensor]:
        """The parts, scaled already, as one row in `order`, if there is an order."""
        x, order = parts[0], self.order
        if order is None:
            return parts
        if order.device != x.device:
            order = self.order = order.to(x.device)
        row = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return [row.index_select(-1, order)]


@dataclass
class Growth:
    """The factor of q in long texts: 1 + rate log(1 + floor(position / size)).

    The formula is that of Llama 4 (transformers: get_llama_4_attn_scale). name: the layer's
    argument that is positions, int64 [B, S]. numbers: a dict of the config, and its keys of both.
    """

    name: str
    numbers: dict[str, Any]
    rate: str
    size: str

    def of(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
        """(the logarithms [B, 1, S, 1], the rate)."""
        steps = torch.div(positions, self.numbers[self.size], rounding_mode="floor")
        return steps.log1p()[:, None, :, None].to(dtype), self.numbers[self.rate]

    def key(self) -> object:
        """Equal where results are."""
        return self.name, id(self.numbers), self.rate, self.size


@dataclass
class Heads(_Ordered):
    """Attention over heads: what makes q, k and v of x [batch, length, size], and what they do.

    projections: their results side by side are q, k, v and gate, in the order that `order` names,
    an index for each value, None for as they are; `factors` multiply them before. No v, where v is
    k before its norm and rotation.
    angles: "whole", cos and sin as they are given; "halves", each value of their first half twice;
    "twice", all of them and all of them again; "back", as whole, by minus the angle; "none",
    nothing is rotated.
    gate: the result is multiplied by sigmoid(gate), one for each of its "values" or "heads".
    told: names of the layer's arguments, and constants.
    shared: the layer's argument that is a mapping of (k, v), and its key there.
    """

    attention: nn.Module
    embeddings: str | None  # the layer's argument that is (cos, sin)
    mask: str | None
    cache: str
    told: tuple[tuple[str, ...], dict[str, Any]] | None  # the cache's update, as `kwargs`
    number: int | None  # the layer's in the cache; None: attention.layer_idx, which may change
    attend: Attend
    heads: int
    kv_heads: int  # 0: k and v are those of `shared`
    head_size: int
    projections: tuple[Any, ...]
    order: Tensor | None
    v_is_k: bool
    gate: str | None
    qk_norms: tuple[Norm, Norm] | None  # norms of each head or of all, before the rotation
    value_norm: Norm | None  # norm of each head of v, without a weight
    interleaved: bool
    angles: str
    shared: tuple[str, Any] | None = None
    factors: Tensor | None = None
    growth: Growth | None = None  # growth of q, behind the rotation

    def norms(self) -> list[Norm | None]:
        return [*(self.qk_norms or ()), self.value_norm]


Limits = tuple[float, float | None]  # the least and the most; None: any


@dataclass(kw_only=True)
class Mixer(_Ordered):
    """A mixer of positions by a convolution of each channel: the layers that make its operands.

    projections: their results side by side are parts of `sizes`; order and factors as in Heads.
    conv: of the first part, or of what is made of some. rates: parameters of `attention`.
    """

    attention: nn.Module
    cache: str
    mask: str | None  # the argument that masks rows of padding
    projections: tuple[Any, ...]
    order: Tensor | None
    factors: Tensor | None
    sizes: tuple[int, ...]
    conv: nn.Module
    rates: tuple[str, ...]
    norm: Norm | None

    def floats(self) -> list[Tensor | None]:
        """The parameters that are no norm's."""
        own = self.attention._parameters
        return [*self.conv._parameters.values(), *(own[name] for name in self.rates)]


@dataclass(kw_only=True)
class Short(Mixer):
    """c conv(b y), of three parts of x; c is number `outer`."""

    outer: int


@dataclass(kw_only=True)
class Delta(Mixer):
    """The gated delta rule on a state.

    The parts are inputs of the convolution, a gate, and a and b of gated_delta, b first where
    b_first. rates: a_log and dt_bias.
    """

    b_first: bool
    heads: int
    dk: int
    dv: int
    norm: Norm  # gated, of each head


@dataclass(kw_only=True)
class Ssm(Mixer):
    """A selective state space, ssm_scan.

    The parts are a gate, inputs of the convolution, and dt. rates: a_log, dt_bias and d. limits:
    those of dt, of a prompt and of a step behind one. norm: of the result, which silu(gate)
    multiplies before or, with gate_last, behind it.
    """

    heads: int
    p: int
    n: int
    limits: tuple[Limits, Limits]
    gate_last: bool


@dataclass
class Whole:
    """A module that is called as it is, whatever it computes, with arguments of the layer."""

    module: nn.Module
    name: str | None  # the argument that is x; None: the first
    passed: dict[str, str]  # {its argument: the layer's}
    constants: dict[str, Any]

    def __call__(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        given = {own: kwargs[name] for own, name in self.passed.items() if name in kwargs}
        given.update(self.constants)
        out: Any = (
            self.module(x, **given) if self.name is None else self.module(**given, **{self.name: x})
        )
        return out[0] if isinstance(out, tuple) else out


@dataclass
class Product:
    """act(linear(x)), times an argument of the layer where `factor` names one.

    projections: that one linear layer. activation "": as it is.
    """

    projections: tuple[Any, ...]
    activation: str
    factor: str | None


@dataclass
class Branch:
    """h + output(core(pre(h))). pre: a norm of ours, or a module that is called as it is."""

    pre: Norm | Whole | None
    core: Heads | Mixer | GatedMLP | Mixture | Product | Whole | Beside
    output: Output


@dataclass
class Beside(_Ordered):
    """Branches of one h and one norm of it, whose outputs are added up.

    Each part has the norm, since its product takes it, but no module that is called in its place.
    projection: those of all parts as one, whose results are `sizes` and scaled by `factors`; None:
    each part's own. adds_x: what the norm gives is added, too, and no part has the norm. divisor:
    of the whole sum.
    """

    parts: tuple[Branch, ...]
    adds_x: bool = False
    divisor: float = 1.0
    projection: Any = None
    sizes: tuple[int, ...] = ()
    factors: Tensor | None = None


@dataclass(kw_only=True)
class Streams(_Ordered):
    """A layer of n streams [n, batch, length, size], whose branches are those of the first.

    Of an h come m = tanh(router(norm(h))) and coefficients, linear layers of m. Before the branches
    h is the first stream, and stream i becomes that and the sum over j of predict(m)[n i + j] times
    stream j. Behind all but the last branch h is what these give, and stream i becomes that and
    1 + correct(m)[i] times what is new in the first. The last branch is given the first stream,
    times a vector, and is added to the others.
    factors: of the router's results, then ones, the bias of `correct`.
    """

    norm: Norm
    router: Any
    predict: Any
    correct: Any = None
    vector: tuple[nn.Module, str] | None = None  # a module's parameter
    order: Tensor | None = None
    factors: Tensor | None = None

    def floats(self) -> list[Tensor | None]:
        """The parameters that are no norm's."""
        return [] if self.vector is None else [self.vector[0]._parameters[self.vector[1]]]


@dataclass
class Recipe:
    """A layer as ops: its branches in turn. Its first argument is x, the others have names."""

    names: frozenset[str]  # the arguments that the layer was seen to take
    branches: tuple[Branch, ...]
    factor: str | None = None  # the layer's buffer that the result is multiplied by
    rest: tuple[None, ...] | None = None  # the Nones behind the result in a tuple
    streams: Streams | None = None

    def __post_init__(self) -> None:
        cores = [branch.core for branch in self.each()]
        self.heads = next((core for core in cores if isinstance(core, Heads)), None)
        self.mixer = next((core for core in cores if isinstance(core, Mixer)), None)

    def each(self) -> Iterator[Branch]:
        """The branches, those beside each other one by one."""
        for branch in self.branches:
            yield from branch.core.parts if isinstance(branch.core, Beside) else (branch,)

    def norms(self) -> list[Norm]:
        every: list[Any] = [] if self.heads is None else self.heads.norms()
        every += [] if self.mixer is None else [self.mixer.norm]
        every += [] if self.streams is None else [self.streams.norm]
        every += (branch.pre for branch in self.branches)
        every += (branch.output.post for branch in self.each())
        return [norm for norm in every if isinstance(norm, Norm)]

    def linears(self) -> list[Any]:
        """The linear layers that our ops compute."""
        every: list[Any] = [] if self.streams is None else [self.streams.router]
        for branch in self.each():
            core = branch.core
            if isinstance(core, Heads | Mixer | Product):
                every += core.projections
            elif isinstance(core, GatedMLP):
                every += core.layers()[:2]
            elif isinstance(core, Mixture):
                every += core.linears()
            every.append(branch.output.linear)
        return [layer for layer in every if layer is not None]

    def ordered(self) -> list[nn.Module]:
        """The linear layers whose input_order the layer follows: those behind mixers have one in
        GGUF files, whose heads are in another order."""
        return [b.output.linear for b in self.each() if isinstance(b.core, Mixer)]

    def called(self) -> list[nn.Module]:
        """The modules that are called as they are."""
        every = [part for branch in self.branches for part in (branch.pre, branch.core)]
        return [part.module for part in every if isinstance(part, Whole)]

"""A decoder layer in a handful of ops: the forward that fuse_ gives to layers it understands."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .activations import changes
from .collective import all_reduce
from .delta import is_recording, mixed
from .exact import as_one_row
from .fused import GatedMLP
from .gate import ACTIVATIONS
from .heads import DIRECT, TRACED, Ops, attended, normed, number, projection
from .mixture import Mixture
from .recipe import (
    Beside,
    Branch,
    Heads,
    Mixer,
    Norm,
    Output,
    Product,
    Recipe,
    Whole,
)
from .rotation import no_angles
from .sharded import ColumnsLinear
from .stand_in import StandIn
from .step import Held, Step
from .streams import through
from .watch import Watch

_NONE = Held()  # the Held of layers without heads


class FusedLayer(StandIn):
    """The forward of a decoder layer, whose class and children stay.

    It is the branches of the recipe in turn. Of attention: norm and projections in one op;
    rotation; cache and attention, as the layer calls them; output and residual. Where the cache
    gives room for the new rows and the attention function says that it is our op, rotation, cache
    and attention are two ops. Of a gated MLP: norm, gate and up; down and residual. What is neither
    is called as it is, between a norm and a sum.
    `forward` is set on the layer, where nn.Module finds it before that of the class, which computes
      where a gradient is recorded, in training and under autocast;
      where an argument is given that the layer was not seen to take;
      where a module of the layer has a hook or another forward, or is another one (an adapter);
      where a number of a module (eps, a scale) or the code of a class is not what fuse_ saw;
      where its linear layers do not all have the same `activations`.
    """

    def __init__(self, layer: nn.Module, recipe: Recipe, step: Step | None, form: str) -> None:
        super().__init__(layer)
        self.recipe, self.step, self.form = recipe, step, form
        self.watch = Watch(layer, recipe.called(), recipe.ordered())
        self.dtype: torch.dtype | None = None  # the last x's, if the layer gives results of it
        self.dtypes: list[torch.dtype | None] = []  # the norms' dtypes for that x
        self._norms = [norm for norm in recipe.norms() if norm.name]
        self.confirmed: tuple[torch.dtype, set[torch.dtype]] | None = None
        self._positions = positions(layer)
        self._dims = 3 if recipe.streams is None else 4
        self._changes = -1  # changes() when kind and alike were read
        self._read_kinds()

    def _read_kinds(self) -> bool:
        """Whether the linear layers read their input in one way: `kind`."""
        if self._changes != changes():
            layers = self.recipe.linears()
            if not all(hasattr(layer, "activations") for layer in layers):
                return False  # an adapter is in the place of one, and may go again
            kinds = {layer.activations for layer in layers}
            self.alike, self.kind, self._changes = len(kinds) == 1, kinds.pop(), changes()
        return self.alike

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe, watch, layer = self.recipe, self.watch, self.module
        if len(args) != 1 and not self._named(args, kwargs):
            return self.original(*args, **kwargs)
        x: Tensor = args[0] if args else kwargs.pop(self._positions[0])
        heads = recipe.heads
        angles = None if heads is None else kwargs.get(heads.embeddings)  # type: ignore[arg-type]
        if x.dim() != self._dims or (angles is None and heads is not None and heads.embeddings):
            return self.original(x, **kwargs)
        positions = None if heads is None else _positions_of(heads, kwargs)
        if positions is None and heads is not None and heads.growth is not None:
            return self.original(x, **kwargs)
        if recipe.mixer is not None and is_recording(recipe.mixer, kwargs):
            return self.original(x, **kwargs)
        if not kwargs.keys() <= recipe.names and _unknown(recipe, kwargs):
            return self.original(x, **kwargs)
        attention = layer if heads is None else heads.attention
        if layer.training or attention.training or not self._read_kinds():
            return self.original(x, **kwargs)
        if torch.is_grad_enabled() and (x.requires_grad or self._trained()):
            return self.original(x, **kwargs)
        if torch.compiler.is_compiling():
            autocasting = torch.is_autocast_enabled(x.device.type)
            if autocasting or not watch.plain() or not self._keeps_dtype(x):
                return self.original(x, **kwargs)
            return self._result(self.fused(x, **kwargs))
        if not (watch.same() or watch.plain()):
            return self.original(x, **kwargs)
        known = x.dtype is self.dtype and self._norm_dtypes() == self.dtypes
        if not known and not self._keeps_dtype(x):
            return self.original(x, **kwargs)
        if torch._C._is_any_autocast_enabled():
            return self.original(x, **kwargs)
        ops = DIRECT[self.kind if x.is_cpu else None]
        if heads is None or self.step is None:
            return self._result(self.compute(ops, x, kwargs, _NONE))
        if angles is None:
            held = self.step.still(x, positions)
        else:
            cos, sin = angles
            held = self.step.of(cos, sin, positions, x)
        cache = kwargs.get(heads.cache)
        begins = getattr(cache, "begins", None)
        if begins is None:
            return self._result(self.compute(ops, x, kwargs, held))
        begins(number(heads))
        try:
            return self._result(self.compute(ops, x, kwargs, held))
        except BaseException:
            cache.undo()  # type: ignore[union-attr]
            raise

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether x is an argument, and those behind it, which kwargs gets, are known by names."""
        if not args:
            return self._positions[:1] != [] and self._positions[0] in kwargs
        names = self._positions[1 : len(args)]
        if len(names) != len(args) - 1 or any(name in kwargs for name in names):
            return False
        kwargs.update(zip(names, args[1:], strict=True))
        return True

    def _result(self, y: Tensor) -> Any:
        rest = self.recipe.rest
        return y if rest is None else (y, *rest)

    def fused(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The layer's result in our ops, whatever became of its modules."""
        return self.compute(
            TRACED[self.kind if x.is_cpu else None], x, kwargs, self._held(x, kwargs)
        )

    def part(self, number: int, h: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The branch of that number of `fused`, and what follows the last."""
        ops, branches = TRACED[self.kind if h.is_cpu else None], self.recipe.branches
        y = self._branch(ops, branches[number], h, kwargs, self._held(h, kwargs))
        return self._scaled(y) if number == len(branches) - 1 else y

    def _held(self, x: Tensor, kwargs: dict[str, Any]) -> Held:
        """The step's Held for these arguments, made anew."""
        if self.step is None:
            return _NONE
        heads: Any = self.recipe.heads
        name = heads.embeddings
        cos, sin = no_angles(x) if name is None else kwargs[name]
        return self.step.made(cos, sin, _positions_of(heads, kwargs), x)

    def compute(self, ops: Ops, x: Tensor, kwargs: dict[str, Any], held: Held) -> Tensor:
        """The layer's result."""
        recipe = self.recipe
        if recipe.streams is not None:
            run = partial(self._branch, ops, kwargs=kwargs, held=held)
            return through(recipe.streams, ops, x, [partial(run, b) for b in recipe.branches])
        for branch in recipe.branches:
            x = self._branch(ops, branch, x, kwargs, held)
        return self._scaled(x)

    def _scaled(self, y: Tensor) -> Tensor:
        factor = self.recipe.factor
        return y if factor is None else y * self.module._buffers[factor]

    def _branch(
        self,
        ops: Ops,
        branch: Branch,
        x: Tensor,
        kwargs: dict[str, Any],
        held: Held,
        h: Tensor | None = None,
        row: Tensor | None = None,
    ) -> Tensor:
        """h, or x, + what the branch makes of x. row: see projected."""
        core, norm, h = branch.core, branch.pre, x if h is None else h
        if isinstance(norm, Whole):
            x, norm = norm(x, kwargs), None
        if isinstance(core, Beside):
            if core.adds_x:
                if norm is not None:
                    x, norm = ops.rms_norm(x, norm.weight(), norm.eps, norm.offset), None
                h = h + x
            rows: Any = (None,) * len(core.parts)
            if core.projection is not None:
                [factors] = core.factors_of(x, (core.projection,))
                row = projection(ops, norm, x, core.projection, factors)
                rows = torch.split(row, list(core.sizes), -1)
            for part, row in zip(core.parts, rows, strict=True):
                h = self._branch(ops, part, x, kwargs, held, h, row)
            return h if core.divisor == 1 else h / core.divisor
        if isinstance(core, Heads):
            a, gate = attended(core, ops, norm, x, kwargs, held, row)
            if gate is not None:
                return _joined(ops, branch.output, gate, (a, "sigmoid"), h)
            return _joined(ops, branch.output, a, None, h)
        if isinstance(core, Mixer):
            y, post = mixed(core, ops, norm, x, kwargs, row)
            order = branch.output.linear._buffers["input_order"]
            if order is not None:
                if post is not None:
                    y, post = ops.rms_norm(y, post.weight(), post.eps, post.offset), None
                y = y.index_select(-1, order)
            return _joined(ops, branch.output, y, None, h, post)
        if isinstance(core, GatedMLP):
            return _joined(ops, branch.output, *self._gated(ops, core, norm, x), residual=h)
        if isinstance(core, Product):
            gate = projection(ops, norm, x, core.projections[0], None) if row is None else row
            if core.factor is None:
                act = ACTIVATIONS.get(core.activation)
                return _joined(ops, branch.output, act(gate) if act else gate, None, h)
            factor = kwargs[core.factor].to(gate.dtype)
            return _joined(ops, branch.output, gate, (factor.contiguous(), core.activation), h)
        if norm is not None:
            x = ops.rms_norm(x, norm.weight(), norm.eps, norm.offset)
        if isinstance(core, Mixture):
            output = branch.output
            if output.post is None and output.scale == 1:
                return core.of(ops, x, h)
            return _added(ops, output, core.of(ops, x, None), h)
        return _joined(ops, branch.output, core(x, kwargs), None, h)

    def _gated(
        self, ops: Ops, mlp: GatedMLP, norm: Norm | None, x: Tensor
    ) -> tuple[Tensor, tuple[Tensor, str] | None]:
        """The input of down, as _joined takes it."""
        gate, up, _ = mlp.layers()
        weights, formats = mlp.weights(gate, up), (gate.format, up.format)
        if mlp.cut or (self.form == "swiglu_linear" and as_one_row(x)):
            a, b = (normed(ops, norm, x, w, f) for w, f in zip(weights, formats, strict=True))
            return mlp.entered(a), (b, mlp.activation)
        given: tuple[Any, ...] = (x, *weights, *formats, mlp.activation)
        if norm is not None:
            given += norm.weight(), norm.eps, norm.offset
        return ops.swiglu(*given, gate_scale=mlp.gate_scale), None

    def _floats(self) -> list[Tensor]:
        """Norms, biases and what a mixer or a mixture has."""
        r = self.recipe
        found = [*(norm.weight() for norm in r.norms()), *(layer.bias for layer in r.linears())]
        for branch in r.each():
            if isinstance(branch.core, Mixer | Mixture):
                found += branch.core.floats()
        found += [] if r.streams is None else r.streams.floats()
        return [t for t in found if t is not None]

    def _trained(self) -> bool:
        mixtures = (b.core for b in self.recipe.each() if isinstance(b.core, Mixture))
        routers = (p for core in mixtures for p in core.router.module.parameters())
        return any(t.requires_grad for t in (*self._floats(), *routers))

    def confirm(self, x: Tensor) -> None:
        """Both forms agree for x's dtype and for those that norms and biases have."""
        self.confirmed = x.dtype, {t.dtype for t in self._floats()}

    def _norm_dtypes(self) -> list[torch.dtype | None]:
        found: list[torch.dtype | None] = []
        for norm in self._norms:
            weight = norm.module._parameters[norm.name]
            found.append(None if weight is None else weight.dtype)
        return found

    def _keeps_dtype(self, x: Tensor) -> bool:
        """Whether no op of the layer's own forward makes another dtype of x's."""
        dtypes = {t.dtype for t in self._floats()}
        if None in self._norm_dtypes():  # a weight was taken away
            return False
        if not dtypes <= {x.dtype} and (x.dtype, dtypes) != self.confirmed:
            return False
        if not torch.compiler.is_compiling():
            self.dtype, self.dtypes = x.dtype, self._norm_dtypes()
        return True


def positions(layer: nn.Module) -> list[str]:
    """The names of the arguments that the layer's own forward takes by their places."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    found = inspect.signature(type(layer).forward).parameters.values()
    return [p.name for p in found if p.kind in kinds][1:]


def _positions_of(heads: Heads, kwargs: dict[str, Any]) -> Tensor | None:
    """The positions by which q grows, if it does."""
    return None if heads.growth is None else kwargs.get(heads.growth.name)


def _unknown(recipe: Recipe, kwargs: dict[str, Any]) -> bool:
    """Whether an argument that the layer was not seen to take says anything."""
    return any(
        value is not None and not (value is False and name.startswith("output_"))
        for name, value in kwargs.items()
        if name not in recipe.names
    )


def _joined(
    ops: Ops,
    output: Output,
    x: Tensor,
    gated: tuple[Tensor, str] | None,
    residual: Tensor,
    norm: Norm | None = None,
) -> Tensor:
    """residual + scale * post(linear(x)); with gated, of act(x) * gated[0] in place of x, with norm
    of norm(x).

    Where the layer has columns of W, linear(x) is a sum over the ranks.
    """
    layer, post, scale = output.linear, output.post, output.scale
    if layer is None:
        return _added(ops, output, x, residual)
    own = layer._parameters
    weight, bias, format = own["weight"], own["bias"], layer.format
    plain = post is None and scale == 1
    added = residual if plain and output.joins else None
    ranks = layer.shard.ranks if type(layer) is ColumnsLinear else None
    if ranks is not None and ranks.rank:
        bias = added = None  # rank 0 adds them
    if norm is not None and not plain:
        x, norm = ops.rms_norm(x, norm.weight(), norm.eps, norm.offset), None
    if norm is not None:
        given = (norm.weight(), norm.eps, norm.offset, weight, bias, format)
        y = ops.norm_linear(x, *given, added)
    elif gated is not None:
        y = ops.swiglu_linear(x, gated[0], weight, bias, format, gated[1], added)
    elif plain or post is not None or own["bias"] is not None or ops.activations or ranks:
        y = ops.linear(x, weight, bias, format, None, added)
    else:
        rows, c = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
        y = ops.gemm(rows, weight, format, c, scale, 1.0)
        return y.view(residual.shape)
    if ranks is not None:
        y = all_reduce(y, ranks)
    return y if plain else _added(ops, output, y, residual)


def _added(ops: Ops, output: Output, y: Tensor, residual: Tensor) -> Tensor:
    """residual + scale * post(y)."""
    post, scale = output.post, output.scale
    if post is not None:
        joined = residual if scale == 1 and output.joins else None
        y = ops.rms_norm(y, post.weight(), post.eps, post.offset, joined)
        if scale == 1:
            return y
    return torch.add(residual, y, alpha=scale)

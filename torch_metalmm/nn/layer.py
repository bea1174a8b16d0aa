"""A decoder layer in a handful of ops: the forward that fuse_ gives to layers it understands."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .activations import KINDS, changes
from .collective import all_reduce
from .fused import GatedMLP, LinearPart
from .recipe import Held, Norm, Output, Recipe, Step, tables
from .sharded import ColumnsLinear
from .watch import Watch


class _Ops:
    """Our ops as functions. direct: without the Python frame by which torch.compile knows them."""

    def __init__(self, direct: bool, activations: str | None) -> None:
        self.activations = activations
        for name in ("linear", "norm_linear", "swiglu", "swiglu_linear"):
            op = getattr(torch.ops.metalmm, name).default
            op = op._op if direct else op
            setattr(self, name, partial(op, activations=activations) if activations else op)
        for name in ("rms_norm", "gemm", "rope", "rope_append", "attention"):
            op = getattr(torch.ops.metalmm, name).default
            setattr(self, name, op._op if direct else op)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


_TRACED, _DIRECT = ({kind: _Ops(d, kind) for kind in (None, *KINDS)} for d in (False, True))


class FusedLayer:
    """The forward of `layer`, which stays the object that it was, its class and children, too.

    Norm and projections in one op; rotation; cache and attention, as the layer calls them; output
    and residual; norm, gate and up; down and residual. An MLP of another kind is called as it is,
    between a norm and a sum. Where the cache gives room for the new rows
    and the attention function says that it is our op, rotation, cache and attention are two ops.
    `forward` is set on the layer, where nn.Module finds it before that of the class, which computes
      where a gradient is recorded, in training and under autocast;
      where an argument is given that the layer was not seen to take;
      where a module of the layer has a hook or another forward, or is another one (an adapter);
      where a number of a module (eps, a scale) or the code of a class is not what fuse_ saw;
      where some of its linear layers round their input to int8 and others do not.
    """

    def __init__(self, layer: nn.Module, recipe: Recipe, step: Step, form: str) -> None:
        self.layer, self.recipe, self.step, self.form = layer, recipe, step, form
        self.watch = Watch(layer)
        self.dtype: torch.dtype | None = None  # the last x's, if the layer gives results of it
        self.dtypes: list[torch.dtype | None] = []  # those of the norms then
        self._norms = [norm for norm in recipe.norms() if norm.name]
        self.confirmed: tuple[torch.dtype, set[torch.dtype]] | None = None
        only = recipe.projections[0] if len(recipe.projections) == 1 else None
        # Of the usual forms, what the modules are called is looked up once.
        self.qkv = None if recipe.whole_norms or isinstance(only, LinearPart) else only
        self.gate: Any = None
        self.up: Any = None
        if isinstance(recipe.mlp, GatedMLP):
            self.gate, self.up, _ = recipe.mlp.layers()
        self._changes = -1  # of settings, when kind and alike were read
        self._read_kinds()

    def _read_kinds(self) -> bool:
        """Whether the linear layers read their input in one way: `kind`."""
        if self._changes != changes():
            kinds = {layer.activations for layer in self.recipe.linears()}
            self.alike, self.kind, self._changes = len(kinds) == 1, kinds.pop(), changes()
        return self.alike

    def attach(self) -> None:
        self.layer.__dict__["forward"] = self.forward

    def detach(self) -> None:
        """Give the layer the forward of its class back."""
        del self.layer.__dict__["forward"]

    def original(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe, watch, layer = self.recipe, self.watch, self.layer
        angles = kwargs.get(recipe.embeddings)
        if len(args) != 1 or angles is None or args[0].dim() != 3:
            return self.original(*args, **kwargs)
        x: Tensor = args[0]
        if not kwargs.keys() <= recipe.names and _unknown(recipe, kwargs):
            return self.original(x, **kwargs)
        if layer.training or recipe.attention.training or not self._read_kinds():
            return self.original(x, **kwargs)
        if torch.is_grad_enabled() and (x.requires_grad or self._trained()):
            return self.original(x, **kwargs)
        if torch.compiler.is_compiling():
            autocasting = torch.is_autocast_enabled(x.device.type)
            if autocasting or not watch.plain() or not self._keeps_dtype(x):
                return self.original(x, **kwargs)
            return self.fused(x, **kwargs)
        if not (watch.same() or watch.plain()):
            return self.original(x, **kwargs)
        known = x.dtype is self.dtype and self._norm_dtypes() == self.dtypes
        if not known and not self._keeps_dtype(x):
            return self.original(x, **kwargs)
        if torch._C._is_any_autocast_enabled():
            return self.original(x, **kwargs)
        held, ops = self.step.of(*angles), _DIRECT[self.kind if x.is_cpu else None]
        cache = kwargs.get(recipe.cache)
        begins = getattr(cache, "begins", None)
        if begins is None:
            return self.compute(ops, x, kwargs, held)
        begins(self.number())
        try:
            return self.compute(ops, x, kwargs, held)
        except BaseException:
            cache.undo()  # type: ignore[union-attr]
            raise

    def number(self) -> Any:
        """The layer's in the cache."""
        recipe = self.recipe
        return recipe.attention.layer_idx if recipe.number is None else recipe.number

    def fused(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The layer's result in our ops, whatever became of its modules."""
        return self.second(self.first(x, **kwargs))

    def second(self, h: Tensor) -> Tensor:
        """The MLP's half of `fused`."""
        return self.mlp(_TRACED[self.kind if h.is_cpu else None], h)

    def first(self, x: Tensor, **kwargs: Any) -> Tensor:
        """The attention's half of `fused`."""
        r = self.recipe
        function, angles = r.attend.function(), tables(r.angles, *kwargs[r.embeddings])
        held = Held((None, None), None, None, *angles, function, None, self.step.op(function))
        return self.attention(_TRACED[self.kind if x.is_cpu else None], x, kwargs, held)

    def compute(self, ops: _Ops, x: Tensor, kwargs: dict[str, Any], held: Held) -> Tensor:
        """The layer's result."""
        return self.mlp(ops, self.attention(ops, x, kwargs, held))

    def attention(self, ops: _Ops, x: Tensor, kwargs: dict[str, Any], held: Held) -> Tensor:
        """x and its attention: what the MLP's half of the layer is given."""
        r = self.recipe
        cache, mask = kwargs.get(r.cache), kwargs.get(r.mask)  # type: ignore[arg-type]
        pre, qkv, v = r.pre, self.qkv, None
        if qkv is None or pre is None:
            qkv, v = self._projected(ops, x)
        else:
            own = qkv._parameters
            weight = pre.module._parameters.get(pre.name)
            qkv = ops.norm_linear(
                x, weight, pre.eps, pre.offset, own["weight"], own["bias"], qkv.format
            )
        a = None
        if held.options is not None and cache is not None:
            a = self._appended(ops, x, (qkv, v), held, cache, mask)
        if a is None:
            a = self._attended(ops, x, (qkv, v), held, kwargs, mask)
        batch, length, _ = x.shape
        return _joined(ops, r.output, a.reshape(batch, length, -1), x)

    def _appended(
        self,
        ops: _Ops,
        x: Tensor,
        projected: tuple[Tensor, Tensor | None],
        held: Held,
        cache: Any,
        mask: Tensor | None,
    ) -> Tensor | None:
        """Rotation, cache and attention in two ops; None if that is not what the layer calls."""
        r, length = self.recipe, x.shape[1]
        find, options = getattr(cache, "room", None), held.options
        if find is None or options is None:
            return None
        if length > 1 and mask is None and not getattr(r.attention, "is_causal", True):
            return None
        found = find(self.number(), x, r.kv_heads, r.head_size)
        if found is None:
            return None
        both, keys, values, slots, k, v, end = found
        norms = {} if r.head_norms is None else _of_heads(*r.head_norms)
        q = ops.rope_append(
            *(projected[0], held.cos, held.sin, r.heads, r.kv_heads),
            *(keys, values, slots, *both),
            v=projected[1],
            interleaved=r.interleaved,
            **norms,
        )
        if mask is not None and mask.shape[2] != length:
            mask = mask.expand(-1, -1, length, -1)
        a: Tensor = ops.attention(q, k, v, *both, end, mask=mask, causal=mask is None, **options)
        return a

    def _attended(
        self,
        ops: _Ops,
        x: Tensor,
        projected: tuple[Tensor, Tensor | None],
        held: Held,
        kwargs: dict[str, Any],
        mask: Tensor | None,
    ) -> Any:
        """Rotation, then cache and attention as the layer calls them."""
        r, direct = self.recipe, held.direct
        norms = {} if r.head_norms is None else _of_heads(*r.head_norms)
        qkv, v = projected
        given = (qkv, held.cos, held.sin, r.heads, r.kv_heads)
        q, k, v = ops.rope(*given, v=v, interleaved=r.interleaved, **norms)
        cache = kwargs.get(r.cache)
        if cache is not None:
            k, v = cache.update(k, v, self.number())
        if direct is not None and x.shape[1] == 1 and mask is None:
            return F.scaled_dot_product_attention(q, k, v, **direct)
        attend = r.attend
        passed = {name: kwargs[name] for name in attend.passed if name in kwargs}
        return held.function(r.attention, q, k, v, mask, **attend.constants, **passed)[0]

    def mlp(self, ops: _Ops, h: Tensor) -> Tensor:
        """h and what the MLP makes of it."""
        r, gate, up = self.recipe, self.gate, self.up
        mlp, norm = r.mlp, r.pre_mlp
        if not isinstance(mlp, GatedMLP):
            normed = h
            if norm is not None:
                normed = ops.rms_norm(h, norm.weight(), norm.eps, norm.offset)
            out = mlp(normed)
            return _joined(ops, r.down, out[0] if isinstance(out, tuple) else out, h)
        if gate is up:
            weights = mlp.weights(gate, up)
        else:
            weights = gate._parameters["weight"], up._parameters["weight"]
        y: Tensor
        # One row. torch.Size.numel would make a constant of a symbolic size.
        if self.form == "swiglu_linear" and h.numel() == h.shape[-1]:
            formats = gate.format, up.format
            a, b = (_normed(ops, norm, h, w, f) for w, f in zip(weights, formats, strict=True))
            return _joined(ops, r.down, a, h, (b, mlp.activation))
        if norm is None:
            y = ops.swiglu(h, *weights, gate.format, up.format, mlp.activation)
        else:
            weight = norm.module._parameters.get(norm.name)
            y = ops.swiglu(
                *(h, *weights, gate.format, up.format, mlp.activation),
                *(weight, norm.eps, norm.offset),
            )
        return _joined(ops, r.down, y, h)

    def _projected(self, ops: _Ops, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(qkv, None), or (q and k, v)."""
        r = self.recipe
        parts = [self._projection(ops, x, layer) for layer in r.projections]
        if r.whole_norms is None and len(parts) < 3:
            return parts[0], parts[1] if len(parts) == 2 else None
        q_size, k_size = r.heads * r.head_size, r.kv_heads * r.head_size
        if len(parts) == 1:
            q, k, v = torch.split(parts[0], [q_size, k_size, k_size], -1)
        elif len(parts) == 2:
            (q, k), v = torch.split(parts[0], [q_size, k_size], -1), parts[1]
        else:
            q, k, v = parts
        if r.whole_norms is not None:
            q, k = (
                ops.rms_norm(t, norm.weight(), norm.eps, norm.offset)
                for t, norm in zip((q, k), r.whole_norms, strict=True)
            )
        return torch.cat((q, k), -1), v

    def _projection(self, ops: _Ops, x: Tensor, layer: Any) -> Tensor:
        if isinstance(layer, LinearPart):
            weight, bias = layer.weight, layer.bias
        else:
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        return _normed(ops, self.recipe.pre, x, weight, layer.format, bias)

    def _floats(self) -> list[Tensor]:
        """Norms and biases."""
        r = self.recipe
        gated = (self.gate, self.up)  # of which the ops take no bias
        biases = [layer.bias for layer in r.linears() if layer not in gated]
        return [t for t in (*(norm.weight() for norm in r.norms()), *biases) if t is not None]

    def _trained(self) -> bool:
        return any(t.requires_grad for t in self._floats())

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


def _of_heads(of_q: Norm, of_k: Norm) -> dict[str, Any]:
    """The arguments of rope that normalise heads."""
    q = of_q.module._parameters.get(of_q.name)
    k = of_k.module._parameters.get(of_k.name)
    return {"q_norm": q, "k_norm": k, "eps": of_q.eps, "offset": of_q.offset}


def _unknown(recipe: Recipe, kwargs: dict[str, Any]) -> bool:
    """Whether an argument that the layer was not seen to take says anything."""
    return any(
        value is not None and not (value is False and name.startswith("output_"))
        for name, value in kwargs.items()
        if name not in recipe.names
    )


def _normed(
    ops: _Ops, norm: Norm | None, x: Tensor, weight: Tensor, format: str, bias: Tensor | None = None
) -> Tensor:
    y: Tensor
    if norm is None:
        y = ops.linear(x, weight, bias, format)
    else:
        y = ops.norm_linear(x, norm.weight(), norm.eps, norm.offset, weight, bias, format)
    return y


def _joined(
    ops: _Ops,
    output: Output,
    x: Tensor,
    residual: Tensor,
    gated: tuple[Tensor, str] | None = None,
) -> Tensor:
    """residual + scale * post(linear(x)); with gated, of act(x) * gated[0] in place of x.

    Where the layer has columns of W, linear(x) is a sum over the ranks.
    """
    layer, post, scale = output.linear, output.post, output.scale
    if layer is None:
        return _added(ops, post, scale, x, residual)
    own = layer._parameters
    weight, bias, format = own["weight"], own["bias"], layer.format
    plain = post is None and scale == 1
    added = residual if plain else None
    ranks = layer.shard.ranks if type(layer) is ColumnsLinear else None
    if ranks is not None and ranks.rank:
        bias = added = None  # rank 0 adds them
    y: Tensor
    if gated is not None:
        y = ops.swiglu_linear(x, gated[0], weight, bias, format, gated[1], added)
    elif plain or post is not None or own["bias"] is not None or ops.activations or ranks:
        y = ops.linear(x, weight, bias, format, None, added)
    else:
        rows, c = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
        y = ops.gemm(rows, weight, format, c, scale, 1.0)
        return y.view(residual.shape)
    if ranks is not None:
        y = all_reduce(y, ranks)
    return y if plain else _added(ops, post, scale, y, residual)


def _added(ops: _Ops, post: Norm | None, scale: float, y: Tensor, residual: Tensor) -> Tensor:
    """residual + scale * post(y)."""
    if post is not None:
        joined = residual if scale == 1 else None
        y = ops.rms_norm(y, post.weight(), post.eps, post.offset, joined)
        if scale == 1:
            return y
    return torch.add(residual, y, alpha=scale)

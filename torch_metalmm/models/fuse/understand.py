"""The recipe of a layer, read from the tensors that its modules passed each other in one call.

A result is followed by the tensor's identity; sums are known by their values. Whether the recipe is
right is for confirm.py to say: here a wrong guess costs only that the layer stays as it is.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.fused import FusedMLP, GatedMLP, plain
from ...nn.gate import ACTIVATIONS
from ...nn.recipe import (
    Beside,
    Branch,
    Heads,
    Mixer,
    Norm,
    Output,
    Product,
    Recipe,
    Streams,
    Whole,
)
from .delta import mixer_of, rescale
from .heads import heads_of
from .mixtures import mixture_of
from .norms import as_norm
from .observe import Call, Seen, convolution_of
from .runs import Unknown, numbers_of, one, split
from .streams import ends_of, streams_of

_DIVISORS = (1.0, 2**0.5)  # divisors of a sum of two; the second keeps the size of one


def recipe_of(layer: nn.Module, runs: list[Seen], heads: bool = True) -> Recipe:
    """The recipe of a layer, the first of whose runs is a prompt with an empty cache.

    heads: whether attention and delta rules are computed by our ops. Unknown: what was seen is not
    what a recipe says, or is nothing that our ops would make less of.
    """
    if not runs or not runs[0].calls:
        raise Unknown("it was not called")
    return _Reader(layer, runs, heads).recipe()


def recipe_of_attention(attention: nn.Module, runs: list[Seen]) -> Recipe:
    """The recipe of a module that attends, for itself; `runs` are those of its layer."""
    own = [seen.of(attention) for seen in runs]
    x = own[0].x
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise Unknown("its first argument is not [batch, length, size]")
    heads, output = heads_of(attention, own, x, own[0].out)
    branch = Branch(None, heads, Output(output, joins=False))
    return Recipe(_names(own), (branch,), rest=(None,))


def attentions_of(runs: list[Seen]) -> list[nn.Module]:
    """The modules of the layer that attend, as its first run had them."""
    return [a.args[0] for a in runs[0].attentions] if runs else []


def _names(runs: list[Seen]) -> frozenset[str]:
    return frozenset(name for seen in runs for name in seen.kwargs)


class _Part(NamedTuple):
    """A core, and what follows: the linear layer of its output, None where the core ends the
    branch; a norm. adds_x: and its x. out: what came of it."""

    core: Any
    linear: Any
    post: Norm | None = None
    adds_x: bool = False
    out: Any = None


class _Reader:
    """Reads a layer's branches off the calls of its modules, from x on."""

    def __init__(self, layer: nn.Module, runs: list[Seen], heads: bool) -> None:
        self.layer, self.runs, self.seen, self.heads = layer, runs, runs[0], heads
        self.attention = attentions_of(runs)[0] if len(runs[0].attentions) == 1 else None
        within = {m for c in self.seen.calls for m in c.module.modules() if m is not c.module}
        tops = [c for c in self.seen.calls if c.module not in within]
        self.calls = [c for c in tops if all(t is not c.out for t in c.inputs)]  # no dropout
        self.factor: str | None = None
        self.streams: Streams | None = None
        out = self.seen.out
        self.rest: tuple[None, ...] | None = None
        if isinstance(out, tuple) and out and all(weights is None for weights in out[1:]):
            out, self.rest = out[0], out[1:]
        self.out = out

    def recipe(self) -> Recipe:
        h, y, branches = self.seen.x, self.out, []
        if not isinstance(y, Tensor) or not isinstance(h, Tensor) or h.dim() not in (3, 4):
            raise Unknown("not one tensor [batch, length, size], or several, from another")
        if h.dim() == 4:
            self.streams, h = streams_of(self.layer, self.calls, h)
        while self.calls:
            if self.streams is not None and self.calls[0].module is self.streams.norm.module:
                h = ends_of(self.streams, self.layer, self.calls, self.seen.x)
            branch, h = self._branch(h)
            branches.append(branch)
        if all(isinstance(branch.core, Whole) for branch in branches):
            raise Unknown("nothing that is ours")
        return Recipe(_names(self.runs), tuple(branches), self.factor, self.rest, self.streams)

    def _branch(self, h: Tensor) -> tuple[Branch, Tensor]:
        """The branch of h, and the sum that it ends in."""
        pre, x = self._pre(h)
        part = self._part(x)
        given = self._given(x) if self.calls else None
        if given is not None or part.adds_x:
            return self._beside(h, pre, x, given, part)
        core, linear, post, *_ = part
        if self.streams is not None and not self.calls:
            return Branch(pre, core, Output(linear, post, joins=False)), self.out
        scale, total = self._sum(h, part.out)
        if isinstance(core, GatedMLP) and core.scale != 1:
            if post is not None:
                raise Unknown("a norm of what is multiplied by a number")
            scale *= core.scale
        return Branch(pre, core, Output(linear, post, scale)), total

    def _part(self, x: Tensor) -> _Part:
        """The part that the next module makes of x, and a norm behind it."""
        part = self._core(self._next(x), x)
        out = self.last.out
        if self.calls and self.calls[0].takes(out):
            post = as_norm(self.calls[0].module, out.shape[-1])
            if post is None or part.adds_x:
                raise Unknown("something between a branch and its sum")
            return part._replace(post=post, out=self.calls.pop(0).out)
        return part._replace(out=out)

    def _given(self, x: Tensor) -> tuple[Tensor, float] | None:
        """(an input of the next module that is x times a number of the layer's, the number)."""
        for factor in (1.0, *numbers_of(self.layer)):
            scaled = x if factor == 1 else x * factor
            for t in self.calls[0].inputs:
                if t is x or (t.shape == x.shape and torch.equal(t, scaled)):
                    return t, factor
        return None

    def _beside(
        self,
        h: Tensor,
        pre: Norm | Whole | None,
        x: Tensor,
        given: tuple[Tensor, float] | None,
        first: _Part,
    ) -> tuple[Branch, Tensor]:
        """The branch of a core and of those of the same x, and the sum that it ends in."""
        found = [first]
        while given is not None:
            part = self._part(given[0])
            if isinstance(part.core, Heads | Mixer):
                rescale(part.core, given[1])
            elif given[1] != 1:
                raise Unknown("a number times what is given to a core of another kind")
            found.append(part)
            given = self._given(x) if self.calls else None
        if any(part.linear is None or getattr(part.core, "scale", 1) != 1 for part in found):
            raise Unknown("cores beside each other that have no output of ours")
        adds_x = [part.adds_x for part in found].count(True)
        scales, divisor, total = self._sum_of(h, [part.out for part in found])
        if adds_x and (adds_x > 1 or scales[0] != 1 or not found[0].adds_x):
            raise Unknown("x is added several times, or times a number")
        # Another module is called once, and so is a norm that is added.
        norm = pre if isinstance(pre, Norm) and not adds_x else None
        parts = (
            Branch(norm, part.core, Output(part.linear, part.post, scale))
            for part, scale in zip(found, scales, strict=True)
        )
        return Branch(pre, Beside(tuple(parts), bool(adds_x), divisor), Output(None)), total

    def _sum_of(self, h: Tensor, outs: list[Tensor]) -> tuple[tuple[float, ...], float, Tensor]:
        """(the scales of `outs`, the divisor of their sum with h, what comes of it), which the next
        module takes, or the end."""
        ends = self.calls[0].inputs if self.calls else [self.out]
        for scales in product((1.0, *numbers_of(self.layer)), repeat=len(outs)):
            scaled = [t if s == 1 else t * s for t, s in zip(outs, scales, strict=True)]
            sums = (h + reduce(add, scaled), reduce(add, scaled, h), reduce(add, scaled[::-1], h))
            for total, divisor, end in product(sums, _DIVISORS, ends):
                if end.shape == total.shape and torch.equal(total / divisor, end):
                    return scales, divisor, end
        raise Unknown("not the sum of branches and their input")

    def _next(self, x: Tensor) -> Call:
        if not self.calls or not self.calls[0].takes(x):
            raise Unknown("a module that is not given what the one before it made")
        self.last = self.calls.pop(0)
        return self.last

    def _pre(self, h: Tensor) -> tuple[Norm | Whole | None, Tensor]:
        """The norm or module before the core, which is given h, and the core's input."""
        first = self.calls[0]
        norm = as_norm(first.module, h.shape[-1]) if first.takes(h) else None
        follows = len(self.calls) > 1 and self.calls[1].takes(first.out)
        if norm is not None and follows:
            self.calls.pop(0)
            return norm, first.out
        same = isinstance(first.out, Tensor) and first.out.shape == h.shape
        called = first.takes(h) and follows and same and first.module is not self.attention
        if called and as_norm(self.calls[1].module, h.shape[-1]) is None:
            self.calls.pop(0)
            return self._whole(first, h), first.out
        return None, h

    def _core(self, call: Call, x: Tensor) -> _Part:
        module = call.module
        if module is self.attention and self.heads:
            return _Part(*heads_of(module, self.runs, x, call.out))
        if self.heads and (conv := convolution_of(module)) is not None:
            return _Part(*mixer_of(module, conv, self.runs, x, call.out))
        if isinstance(module, FusedMLP):
            return _Part(module.gated, module.gated.layers()[2])
        if isinstance(module, QuantLinear):
            return self._product(call)
        if self.heads and (mixture := mixture_of(call, x)) is not None:
            return _Part(mixture, None)
        return self._plain_mlp(call, x) or _Part(self._whole(call, x), None)

    def _plain_mlp(self, call: Call, x: Tensor) -> _Part | None:
        """The linear layers of a module that has two, with an activation between them or none, and
        a norm of what they give to which it may add x."""
        inside = set(call.module.modules())
        linears = [c for c in self.seen.calls if c.module in inside and plain(c.module)]
        if len(linears) != 2 or any(True for _ in call.module.parameters(recurse=False)):
            return None
        up, down = linears
        norms = [c for c in self.seen.calls if c.module in inside and c.takes(down.out)]
        post = as_norm(norms[0].module, x.shape[-1]) if len(norms) == 1 else None
        out = down.out if post is None else norms[0].out
        adds_x = out is not call.out
        same = not adds_x or (out.shape == x.shape and same_values(x + out, call.out))
        if up.inputs[0] is not x or not same:
            return None
        functions: dict[str, Any] = {"": nn.Identity(), **ACTIVATIONS}
        for activation, function in functions.items():
            if same_values(function(up.out), down.inputs[0]):
                return _Part(Product((up.module,), activation, None), down.module, post, adds_x)
        return None

    def _product(self, call: Call) -> _Part:
        """The linear layer of the call, an activation, an argument's factor, and a linear layer."""
        if self.calls and not isinstance(self.calls[0].module, QuantLinear):
            self._next(call.out)  # the activation function
        down = self.calls.pop(0) if self.calls else call
        if not isinstance(down.module, QuantLinear) or down is call:
            raise Unknown("a linear layer of another kind")
        self.last = down
        for name, value in self.seen.kwargs.items():
            if isinstance(value, Tensor) and value.shape == call.out.shape:
                for activation, function in ACTIVATIONS.items():
                    if same_values(function(call.out) * value, down.inputs[0]):
                        return _Part(Product((call.module,), activation, name), down.module)
        raise Unknown("a product that is not an argument's")

    def _whole(self, call: Call, x: Tensor) -> Whole:
        """The call as the layer makes it in every run."""
        calls = [one(c for c in seen.calls if c.module is call.module) for seen in self.runs]
        name = next((n for n, value in call.kwargs.items() if value is x), None)
        if len(call.args) != (1 if name is None else 0) or (call.args and call.args[0] is not x):
            raise Unknown("a module with arguments that have no names")
        given = [{n: v for n, v in c.kwargs.items() if n != name} for c in calls]
        layers = [seen.kwargs for seen in self.runs]
        return Whole(call.module, name, *split(given, layers, renames=True))

    def _sum(self, h: Tensor, out: Tensor) -> tuple[float, Tensor]:
        """(the scale of `out`, the sum), which the next module takes, or the layer gives."""
        one_of = {n: b for n, b in self.layer._buffers.items() if b is not None and b.numel() == 1}
        for name, buffer in one_of.items():
            if not self.calls and same_values((h + out) * buffer, self.out):
                self.factor = name
                return 1.0, self.out
        (scale,), divisor, total = self._sum_of(h, [out])
        if divisor != 1:
            raise Unknown("one branch whose sum is divided")
        return scale, total


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a, b.reshape(a.shape))

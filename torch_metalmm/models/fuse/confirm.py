"""Whether the fused form of a layer gives what the layer gives, and writes the same to the cache.

Both forms get the arguments of every observed call, each with a cache of its own; some of them in
f32, too, where a wrong eps or an activation of another kind cannot hide in roundings. One is at
positions behind all that the model says to have: what grows with the position, but for the angles
that it is given, may begin there. The last has random states, of another size in each row of the
batch, because some layers clamp.

The bound: a layer has about ten stages that round (norm, projections, rotation, scores, softmax,
mix, output, norm, gate and up, down), each once in the dtype and, in sums of K products, as sqrt(K)
roundings of f32 do when they are independent. What a rounding of one stage does to the result is
measured: the layer's own forward runs again on inputs with relative errors of 2^-8, random signs,
which reach each stage as errors of about that size. With d the change of the result,
    |fused - layer| <= (u + sqrt(K) 2^-24) (10 |d| / 2^-8 + |layer|)
with norms over each row of the batch. The last term is the rounding of the last sums, of which d
may say little: where a layer of SmolLM2 makes 20000 of 500, d / 2^-8 is |layer| / 36.
u of f32 is 2^-24. It is at least that of the weights of a convolution, in whose dtype layers
convolve, and of the vector of streams, to whose dtype they are rounded, and 2^-11 on GPUs, which
may multiply weights rounded to f16. Layers of
14 architectures take at most half of the bound in f16 and a sixth in f32, most of them a tenth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.fused import GatedMLP
from ...nn.heads import number
from ...nn.layer import FusedLayer
from ...nn.mixture import Mixture
from ...nn.recipe import Branch, Heads, Mixer, Product, Short
from ...nn.sharded import everywhere
from .observe import Seen, copy_of, stored
from .runs import evaluating, normal

_STAGES = 10
_ERROR = 2.0**-8
_SCALES = (1.0, 100.0, 0.01)  # for three rows
_FAR = 2**24  # positions, more than any context; f32 tells them from the next


def roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of a rounding to the dtype."""
    return torch.finfo(dtype).eps / 2


def agrees(fused: FusedLayer, runs: list[Seen], is_known: bool = False) -> bool:
    """is_known: another layer of the kind has agreed in every case; this one runs the first."""
    layer = fused.module
    k = max(m.in_features for m in layer.modules() if isinstance(m, QuantLinear))
    with torch.inference_mode(False), torch.no_grad(), evaluating(layer):
        cases = islice(_cases(runs), 1 if is_known else None)
        return all(everywhere(layer, _close(fused, k, *case)) for case in cases)


def _cases(runs: list[Seen]) -> Iterator[tuple[Tensor, dict[str, Any], Any, bool]]:
    """(x, the other arguments, the cache, whether the layer may refuse the dtype, or round it)."""
    for seen in runs:
        yield seen.x, seen.kwargs, seen.before, False
    first = runs[0]
    yield first.x, {k: _moved_far(v) for k, v in first.kwargs.items()}, first.before, True
    narrow = first.x.dtype != torch.float32
    for seen in runs[1:4]:
        x: Tensor = seen.x
        wide = {name: _widened(value) for name, value in seen.kwargs.items()}
        cache = _wide_cache(seen.before)
        if narrow:
            yield x.float(), wide, cache, True
    random = normal(*x.shape).to(x.device)
    for row, scale in zip(random.movedim(-3, 0), _SCALES, strict=True):
        row.mul_(scale)
    yield random, wide, cache, narrow


def _close(
    fused: FusedLayer, k: int, x: Tensor, kwargs: dict[str, Any], cache: Any, may_fail: bool
) -> bool:
    signs = normal(*x.shape, seed=1).sign().to(x.device)
    moved = (x.float() * (1 + _ERROR * signs)).to(x.dtype)
    try:
        want = _run(_branches(fused), fused, x, kwargs, cache)
        near = _run(_branches(fused), fused, moved, kwargs, cache)
    except Exception:
        return may_fail
    if may_fail and x.dtype == torch.float32 and {t.dtype for t in want} != {torch.float32}:
        return True  # the layer rounds what it is given: nothing is seen in f32
    try:
        got = _run(_fused_branches(fused, want), fused, x, kwargs, cache)
    except Exception:
        return False
    recipe = fused.recipe
    weights: list[Any] = [] if recipe.mixer is None else [recipe.mixer.conv._parameters["weight"]]
    weights += [] if recipe.streams is None else recipe.streams.floats()
    u = max(roundoff(t.dtype) for t in (x, *weights))
    if x.device.type != "cpu":
        u = max(u, roundoff(torch.float16))
    rounding = u + k**0.5 * roundoff(torch.float32)
    for a, b, c in zip(got, want, near, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        # Some GPUs have no float64.
        a, b, c = (t.float().cpu().double().flatten(1) for t in (a, b, c))
        changed = (c - b).norm(dim=1) / _ERROR
        bound = rounding * (_STAGES * changed + b.norm(dim=1))
        if not bool(((a - b).norm(dim=1) <= bound).all()):
            return False
    return True


def _run(
    branches: Any, fused: FusedLayer, x: Tensor, kwargs: dict[str, Any], cache: Any
) -> list[Tensor]:
    """The results of branches, or the streams, by rows of the batch; keys, values and states in the
    cache afterwards, and shared ones."""
    own, heads, mixer = copy_of(cache), fused.recipe.heads, fused.recipe.mixer
    given = {n: copy.copy(v) if isinstance(v, Mapping) else v for n, v in kwargs.items()}
    given.update({name: own for name, v in given.items() if hasattr(v, "update_conv_state")})
    found = [y.movedim(-3, 0) for y in branches(x.clone(), **given)]
    if heads is not None and heads.kv_heads:
        layer = own.layers[number(heads)]
        found += (layer.keys, layer.values)
    if mixer is not None:
        layer = own.layers[mixer.attention.layer_idx]
        found.append(layer.conv_states[0])
        found += [] if isinstance(mixer, Short) else [layer.recurrent_states[0]]
    for pair in stored(kwargs, given).values():
        found += pair
    return found


def _branches(fused: FusedLayer) -> Any:
    """The layer's own forward as a function that gives what each branch gives, or the streams."""
    recipe, seen = fused.recipe, []

    def see(_: Any, args: Any, kwargs: Any) -> None:
        given = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        seen.append(next(given).clone())

    def run(x: Tensor, **kwargs: Any) -> list[Tensor]:
        branches = recipe.branches[1:] if recipe.streams is None else ()
        entries = [_entry(fused.module, branch) for branch in branches]
        hooks = [e.register_forward_pre_hook(see, with_kwargs=True) for e in entries]
        try:
            y = fused.original(x, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        return [*seen, y if recipe.rest is None else y[0]]

    return run


def _entry(layer: nn.Module, branch: Branch) -> nn.Module:
    """The module that is given what the branch is given."""
    first: Any = branch.core if branch.pre is None else branch.pre
    if isinstance(first, GatedMLP):
        found: Any = next(m for m in layer.modules() if getattr(m, "gated", None) is first)
    elif isinstance(first, Heads | Mixer):
        found = first.attention
    elif isinstance(first, Mixture):
        found = first.module
    else:
        found = first.projections[0] if isinstance(first, Product) else first.module
    return found


def _fused_branches(fused: FusedLayer, sums: list[Tensor]) -> Any:
    """Each branch in our ops, of the layer's own sum before it: routers choose by roundings."""

    def run(x: Tensor, **kwargs: Any) -> list[Tensor]:
        if fused.recipe.streams is not None:
            return [fused.fused(x, **kwargs)]
        starts = [x, *sums[: len(fused.recipe.branches) - 1]]
        return [fused.part(i, h, kwargs) for i, h in enumerate(starts)]

    return run


def _moved_far(value: Any) -> Any:
    """Positions, which are the integers that a layer is given, behind every context."""
    is_integer = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)
    return value + _FAR if is_integer else value


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_widened(v) for v in value)
    if isinstance(value, Mapping):
        wide = copy.copy(value)
        for key, v in value.items():
            wide[key] = _widened(v)  # type: ignore[index]
        return wide
    return value


def _wide_cache(cache: Any) -> Any:
    own = copy_of(cache)
    for layer in own.layers:
        for name, value in vars(layer).items():
            setattr(layer, name, _widened(value))
    return own

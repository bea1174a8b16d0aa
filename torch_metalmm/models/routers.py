"""Which modules choose experts as torch.ops.metalmm.route does: found by running them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.fused import unhooked
from ..nn.layer import positions
from ..nn.router import FusedRouter, Router
from .fuse.runs import Unknown, normal

_U = 2.0**-24
_SCALES = (1.0, 8.0, 1 / 8)  # of rows


def fuse_routers(model: nn.Module) -> None:
    """Give each router a forward of our op where its parent then gives what it gave.

    A parent that takes more than x is not run: the router's own numbers are then all that is known.
    """
    for parent in list(model.modules()):
        for child in parent.children():
            try:
                fused = FusedRouter(_as_router(child))
                weight = child.get_parameter(fused.router.weight)
                x = normal(1, 4, weight.shape[1]).to(weight)
                with torch.no_grad():
                    want = parent(x)
            except Exception:  # Unknown, or a module that is given something else
                continue
            fused.attach()
            try:
                with torch.no_grad():
                    _check_near(parent(x), want, 64 * torch.finfo(x.dtype).eps)
            except Exception:
                fused.detach()


def _check_near(got: Any, want: Any, bound: float) -> None:
    got, want = (t[0] if isinstance(t, tuple) else t for t in (got, want))
    if not isinstance(got, Tensor) or not (got - want).norm() <= bound * want.norm():
        raise Unknown("another result")


def _as_router(module: nn.Module) -> Router:
    """The router that the module is, whatever its tensors hold. Unknown: it is none."""
    own: dict[str, Any] = {**module._parameters, **module._buffers}
    tables = [n for n, t in own.items() if t is not None and t.dim() == 2]
    names = positions(module)
    if module._modules or len(tables) != 1 or len(names) > 2 or not unhooked(module):
        raise Unknown("more than a table and its biases")
    weight = own[tables[0]]
    experts, k = weight.shape
    given = [normal(experts, seed=8)] * (len(names) - 1)
    x = torch.cat([normal(8, k, seed=9) * scale for scale in _SCALES])
    with torch.no_grad():
        _, like, _ = module(*(t.to(weight) for t in (x, *given)))
        trial = copy.deepcopy(module).float().cpu()
        vectors = [n for n, t in own.items() if t is not None and t.shape == (experts,)]
        for i, name in enumerate((*tables, *vectors)):  # zeros would say nothing
            tensor = getattr(trial, name)
            tensor.copy_(normal(*tensor.shape, seed=i) * (0.5 if i else k**-0.5))
        _, want, ids = trial(x, *given)
        if ids.dtype != torch.int64:
            raise Unknown("ids that the op does not give")
        order = ids.argsort(-1)
        biases: list[str | None] = [None, None, *vectors, *([""] if given else [])]
        for options in _options(module, experts):
            for bias, choice in dict.fromkeys(permutations(biases, 2)):
                if bias == "":
                    continue
                keeps = like.dtype == weight.dtype
                router = Router(module, ids.shape[1], tables[0], bias, choice, options, keeps)
                try:
                    got, chosen = router.route(trial, x, *given)
                except ValueError:  # groups of which too few are left
                    continue
                by = chosen.argsort(-1)
                if torch.equal(chosen.gather(1, by), ids.gather(1, order)):
                    # Both add up k products for a logit, as which a weight changes at most.
                    error = (got.gather(1, by) - want.gather(1, order)).abs().max()
                    if error <= 64 * k * _U * want.abs().max():
                        return router
    raise Unknown("another choice")


def _options(module: nn.Module, experts: int) -> Iterator[dict[str, Any]]:
    """What a router with these numbers may compute."""
    numbers = [v for v in vars(module).values() if isinstance(v, int | float) and v > 0]
    whole = sorted({v for v in numbers if type(v) is int and v < experts})
    groups: list[dict[str, Any]] = [{}]
    for count, kept in permutations(whole, 2):
        if 1 < count <= 32 and experts % count == 0 and kept < count:
            groups += [
                {"groups": count, "kept_groups": kept, "group_best": best} for best in (2, 1)
            ]
    for scale in dict.fromkeys((1.0, *(v for v in numbers if type(v) is float))):
        for more in groups:
            for scoring in ("softmax", "sigmoid"):
                for renormalise in (True, False):
                    given = {"scoring": scoring, "renormalise": renormalise, "scale": scale}
                    yield given | more

"""Modules that choose experts as torch.ops.metalmm.route does: found by running them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import QuantLinear
from ..nn.fused import plain, unhooked
from ..nn.layer import positions
from ..nn.packed import Packed
from ..nn.router import FusedRouter, Router, tensor_of
from .fuse.runs import Unknown, normal

_U = 2.0**-24
_SCALES = (1.0, 8.0, 1 / 8)  # factors of rows


def fuse_routers(model: nn.Module) -> None:
    """Give each router a forward of our op where its parent then gives what it gave.

    A parent that takes more than x is not run: the router's own numbers are then all that is known.
    """
    for parent in list(model.modules()):
        for child in parent.children():
            try:
                fused = FusedRouter(_as_router(child))
                x = normal(1, 4, _table_of(child)[2]).to(_like(child, parent))
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
    names = positions(module)
    table, experts, k = _table_of(module)
    if len(names) > 2 or not all(map(unhooked, module.modules())):
        raise Unknown("more arguments, or hooks")
    given = [normal(experts, seed=8)] * (len(names) - 1)
    x = torch.cat([normal(8, k, seed=9) * scale for scale in _SCALES])
    with torch.no_grad():
        x, keeps = _called(module, x, given)
        trial = _dense(module, table, experts, k)
        own = {**dict(trial.named_parameters()), **dict(trial.named_buffers())}
        vectors = [n for n, t in own.items() if n != table and t.numel() == experts]
        for i, name in enumerate((table, *vectors)):  # zeros would say nothing
            own[name].copy_(normal(*own[name].shape, seed=i) * (0.5 if i else k**-0.5))
        _, want, ids = trial(x, *given)
        x = x.flatten(0, -2)
        if ids.dtype != torch.int64:
            raise Unknown("ids that the op does not give")
        order = ids.argsort(-1)
        biases: list[str | None] = [None, None, *vectors, *([""] if given else [])]
        for options in _options(module, experts):
            for bias, choice in dict.fromkeys(permutations(biases, 2)):
                if bias == "":
                    continue
                router = Router(module, ids.shape[1], table, bias, choice, options, keeps)
                try:
                    got, chosen = router.route(trial, x, *given)
                except ValueError:  # groups of which too few are left
                    continue
                by = chosen.argsort(-1)
                if torch.equal(chosen.gather(1, by), ids.gather(1, order)):
                    # Either logit is a sum of k products; a weight changes at most as its logit.
                    error = (got.gather(1, by) - want.gather(1, order)).abs().max()
                    if error <= 64 * k * _U * want.abs().max():
                        return router
    raise Unknown("another choice")


def _like(*modules: nn.Module, default: torch.dtype = torch.float32) -> Tensor:
    """A tensor of the dtype and on the device of what the first module is given."""
    floats = (p for m in modules for p in m.parameters() if p.is_floating_point())
    found = next(floats, None)
    if found is not None:
        return found
    return torch.empty(0, dtype=default, device=next(modules[0].parameters()).device)


def _table_of(module: nn.Module) -> tuple[str, int, int]:
    """(the name of the tensor that makes logits of x, how many, of how many values).

    Unknown: there is not one, or more than biases beside it.
    """
    if isinstance(module, Packed):
        raise Unknown("a layer, which gives one result")
    found = [
        (name, t.shape[0], owner.in_features if type(owner) is QuantLinear else t.shape[1])
        for name, t in module.named_parameters()
        if t.dim() == 2 and t.shape[0] > 1
        for owner in [tensor_of(module, name)[0]]
        if type(owner) is not QuantLinear or plain(owner)
    ]
    if len(found) != 1:
        raise Unknown("more than a table and its biases")
    name, experts, k = found[0]
    own = [*module.named_parameters(), *module.named_buffers()]
    if any(t.numel() != experts for other, t in own if other != name):
        raise Unknown("more than a table and its biases")
    return name, experts, k


def _dense(module: nn.Module, table: str, experts: int, k: int) -> Any:
    """A copy in f32 on the CPU, whose table any numbers may be written to."""
    owner, path = tensor_of(module, table)[0], table.rpartition(".")[0]
    trial = copy.deepcopy(module)
    if isinstance(owner, QuantLinear):
        linear = nn.Linear(k, experts, owner.bias is not None, device="meta")
        trial.set_submodule(path, linear.to_empty(device="cpu"))
    return trial.float().cpu().requires_grad_(False)


def _called(module: nn.Module, x: Tensor, given: list[Tensor]) -> tuple[Tensor, bool]:
    """(x [T, K], or [1, T, K] where the module takes this alone, whether weights have its dtype).

    A packed layer takes x of any dtype: of f16, f32 weights are seen to be of f32.
    """
    like = _like(module, default=torch.float16)
    rows = [t.to(like) for t in (x, *given)]
    try:
        _, weights, _ = module(*rows)
    except ValueError:  # the module unpacks another shape
        x = x[None]
        _, weights, _ = module(rows[0][None], *rows[1:])
    return x, weights.dtype == like.dtype


def _options(module: nn.Module, experts: int) -> Iterator[dict[str, Any]]:
    """The options with which the op may compute what a router with these numbers does."""
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

"""Modules that are RMS norms: found by running them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...nn.fused import unhooked
from ...nn.recipe import Norm
from .runs import normal

_U = 2.0**-24
_OFFSETS = (0.0, 1.0)
_SCALES = (1.0, 30.0, 3e3, 1e-2, 1e-3, 1e-4)


def as_norm(
    module: nn.Module,
    size: int,
    gated: bool = False,
    centred: bool = False,
    groups: int = 1,
    gate_first: bool = False,
) -> Norm | None:
    """The norm over rows of `size`, if the module computes one.

    eps is any of the module's numbers. A result has the roundings of the sum, at most `size`, and a
    few more; some rows are so small that eps decides, others so large that a clamp shows. gated: it
    takes a gate, too, and multiplies by silu(gate), in 8 more roundings; with gate_first before it
    takes the norm, where they err again. centred: of rows less their means, which are sums of as
    many roundings in proportion to the largest value. groups: of so many parts of a row.
    """
    names = [name for name, p in module._parameters.items() if p is not None]
    if module._modules or len(names) > 1 or not unhooked(module):
        return None
    weight = module._parameters[names[0]] if names else None
    if weight is not None and weight.shape != (size,):
        return None
    device = next(module.parameters()).device if names else torch.device("cpu")
    rows = normal(2 * len(_SCALES), size)
    for i, scale in enumerate(_SCALES):
        rows[2 * i : 2 * i + 2] *= scale
    for i in range(0, len(rows), 2):
        rows[i, 7 * i % size] *= 1000  # the others vanish beside this value
    gate = normal(*rows.shape, seed=1)
    try:
        with torch.no_grad():
            got = module(rows.to(device), *(gate.to(device),) * gated)
    except Exception:
        return None
    if not isinstance(got, Tensor) or got.shape != rows.shape or not got.is_floating_point():
        return None
    x, got = rows.double(), got.cpu().double()
    size_of = x.abs()
    if centred:
        size_of = size_of + size_of.amax(-1, keepdim=True)
        x = x - x.mean(-1, keepdim=True)
    gates = nn.functional.silu(gate.double()) if gated else torch.ones_like(x)
    if gate_first:
        x, size_of, gates = x * gates, (x * gates).abs(), torch.ones_like(x)
    mean = x.square().reshape(len(x), groups, -1).mean(-1).repeat_interleave(size // groups, -1)
    factor = torch.zeros_like(x[0]) if weight is None else weight.detach().cpu().double()
    for eps in {v for v in vars(module).values() if isinstance(v, float)}:
        for offset in _OFFSETS if weight is not None else (1.0,):
            factors = gates * (mean + eps).rsqrt()
            want = x * factors * (offset + factor)
            # offset + weight is rounded to f32, in proportion to both.
            bound = (size + 8 + 8 * gated * (1 + gate_first)) * _U * (size_of * factors).abs()
            bound = bound * (offset + factor.abs())
            if bool(((got - want).abs() <= bound + 2.0**-126).all()):
                return Norm(module, "".join(names), eps, offset if names else 0.0, size, groups)
    return None

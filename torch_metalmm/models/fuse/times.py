"""Which of the two forms of a gated MLP is faster for one row, on the machine at hand."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ...nn.fused import FORMS, Roles, SwiGLU

_TIMED = 16  # MLPs of one size that are timed


@dataclass(frozen=True)
class MLP:
    """A module that computes a gated MLP, the roles of its layers and the gate's activation."""

    module: Any
    roles: Roles
    activation: str = "silu"

    def fused(self, form: str, note: str = "") -> SwiGLU:
        return SwiGLU(self.module, self.roles, form, note, self.activation)

    def sizes(self) -> object:
        """What the time of a row depends on, apart from the dtype."""
        names = (self.roles.gate, self.roles.up, self.roles.down)
        layers = [self.module._modules[name] for name in names if name is not None]
        return (
            str(layers[0].weight.device),
            self.roles.gate_first,
            self.activation,
            *((layer.format, layer.in_features, layer.out_features) for layer in layers),
        )


_TIMES: dict[object, tuple[float, float]] = {}


def faster_forms(mlps: list[MLP], dtype: torch.dtype) -> dict[object, tuple[str, str]]:
    """{sizes: (the form that takes less time for one row on this machine, both times in words)}."""
    alike: dict[object, list[MLP]] = {}
    for mlp in mlps:
        alike.setdefault(mlp.sizes(), []).append(mlp)
    chosen = {}
    for sizes, group in alike.items():
        if (sizes, dtype) not in _TIMES:
            _TIMES[sizes, dtype] = _times(group, dtype)
        times = _TIMES[sizes, dtype]
        parts = ", ".join(f"{form} {1e6 * t:.1f} us" for form, t in zip(FORMS, times, strict=True))
        chosen[sizes] = FORMS[times.index(min(times))], f", for one row {parts}"
    return chosen


def _times(mlps: list[MLP], dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of one row of an MLP in each form: medians of short runs, the forms by turns.

    A run goes through the MLPs one after the other, as decoding does, which in a model of any size
    finds their weights in memory and not in a cache.
    """
    first = mlps[0].module._modules[mlps[0].roles.gate]
    device, k = first.weight.device, first.in_features
    x = torch.ones(1, k, dtype=dtype, device=device)
    modules = [[m.fused(form) for m in mlps[:_TIMED]] for form in FORMS]
    samples: list[list[float]] = [[] for _ in FORMS]
    rounds = max(1, 4 // len(mlps))
    with torch.inference_mode():
        for _ in range(9):
            for of_form, seconds in zip(modules, samples, strict=True):
                _synchronize(device)
                start = perf_counter()
                for _ in range(rounds):
                    for module in of_form:
                        module(x)
                _synchronize(device)
                seconds.append((perf_counter() - start) / (rounds * len(of_form)))
    one, other = (median(seconds[2:]) for seconds in samples)  # the first two warm up
    return one, other


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

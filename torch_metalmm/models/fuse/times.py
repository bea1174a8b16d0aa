"""The faster of the two forms of a gated MLP for one row, on the machine at hand."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from ...nn.fused import FORMS, FusedMLP, GatedMLP

_TIMED = 16  # MLPs of one size that are timed


def sizes_of(mlp: GatedMLP) -> object:
    """Sizes and settings that the time of a row depends on, apart from the dtype."""
    layers = mlp.layers() if mlp.roles.up is not None else mlp.layers()[1:]
    return (
        str(layers[0].weight.device),
        mlp.roles.gate_first,
        mlp.activation,
        mlp.cut,
        *((layer.format, layer.in_features, layer.out_features) for layer in layers),
    )


_TIMES: dict[object, tuple[float, float]] = {}


def faster_forms(mlps: list[GatedMLP], dtype: torch.dtype) -> dict[object, tuple[str, str]]:
    """{sizes: (the form that takes less time for one row on this machine, both times in words)}."""
    alike: dict[object, list[GatedMLP]] = {}
    for mlp in mlps:
        alike.setdefault(sizes_of(mlp), []).append(mlp)
    chosen = {}
    for sizes, group in alike.items():
        if (sizes, dtype) not in _TIMES:
            _TIMES[sizes, dtype] = _times(group, dtype)
        times = _TIMES[sizes, dtype]
        parts = ", ".join(f"{form} {1e6 * t:.1f} us" for form, t in zip(FORMS, times, strict=True))
        chosen[sizes] = FORMS[times.index(min(times))], f", for one row {parts}"
    return chosen


def _times(mlps: list[GatedMLP], dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of one row of an MLP in each form: medians of short runs, the forms by turns.

    A run goes through the MLPs one after the other, as decoding does, which in a model of any size
    finds their weights in memory and not in a cache.
    """
    first = mlps[0].layers()[0]
    device, k = first.weight.device, first.in_features
    x = torch.ones(1, k, dtype=dtype, device=device)
    modules = [[FusedMLP(m, form) for m in mlps[:_TIMED]] for form in FORMS]
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

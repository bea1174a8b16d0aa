"""The errors that merging adapters into packed weights cost."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from statistics import median
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...nn.packed import Packed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeError:
    """|packed - merged| in Frobenius norms: over |merged|, and over |merged - base|."""

    weight: float
    update: float


_ERRORS: WeakKeyDictionary[nn.Module, MergeError] = WeakKeyDictionary()


def merge_errors(model: nn.Module) -> dict[str, MergeError]:
    """The error of packing again, by name, of each packed layer of `model` with merged adapters."""
    return {
        n.removesuffix(".base_layer"): _ERRORS[m] for n, m in model.named_modules() if m in _ERRORS
    }


def record(layer: Packed, base: Tensor, merged: Tensor) -> None:
    """Note the error of `layer`, which packs `merged`, made from `base`."""
    error = float(torch.linalg.norm(layer.dequantize() - merged))
    sizes = (float(torch.linalg.norm(t)) for t in (merged, merged - base))
    _ERRORS[layer] = MergeError(*(error / size if size else 0.0 for size in sizes))


def forget(layer: nn.Module) -> None:
    """Drop the record of a layer whose adapters were unmerged."""
    _ERRORS.pop(layer, None)


@contextmanager
def merges_reported(model: nn.Module) -> Iterator[None]:
    """Warns, when it ends, of what the merges inside cost; logs the error of every layer."""
    before = {id(e): e for e in _ERRORS.values()}  # alive, so that no id is given again
    yield
    merged = {n: e for n, e in merge_errors(model).items() if id(e) not in before}
    if not merged:
        return
    for name, error in merged.items():
        _log.info("merged %s: error / weight %.3g, error / update %.3g", name, *astuple(error))
    worst = max(merged, key=lambda name: merged[name].weight)
    updates = sorted(e.update for e in merged.values())
    warnings.warn(
        f"packing {len(merged)} merged layers again costs relative errors up to "
        f"{merged[worst].weight:.2%} of the weight ({worst}), {median(updates):.2g} times what the "
        f"adapters change (median; at most {updates[-1]:.2g}); torch_metalmm.merge_errors(model) "
        "lists them",
        stacklevel=4,
    )

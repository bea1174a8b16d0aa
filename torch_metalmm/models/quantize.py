"""Replacing the dense layers of a model by packed ones, in place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

from torch import Tensor, nn

from .. import formats
from ..nn import QuantEmbedding, QuantLinear
from ..nn.fused import LinearPart
from ..nn.packed import quantize_weight
from ..nn.sharded import is_sharded
from .attach import attach, is_transformers_model, quantized_by_another
from .replace import (
    dense_weight,
    largest_magnitude,
    pack_module,
    packable,
    replaceable,
    stacked_weights,
    summary,
    weight_shape,
)

Spec = str | Mapping[str, str | None] | Callable[[str, nn.Module], str | None]
Filter = Callable[[str, nn.Module], bool]
_Sites = list[tuple[str, nn.Module]]  # the layers that hold one weight, by name

_F16_MAX = 65504.0


def resolve_format(format: str, in_features: int) -> str:
    """The format a weight of that K gets when `format` is asked for.

    `format` itself where K is a multiple of its block. Else q4_k gives q5_0, q5_k q5_1, q6_k q8_0,
    q2_k, q3_k and iq4_xs iq4_nl, tq1_0 and tq2_0 q4_0, nvfp4 mxfp4, mxfp8 q8_0, and affine the
    largest smaller group that divides K; where that does not fit either (K not a multiple of 32),
    f16. ValueError: unknown format.
    """
    f = formats.get(format)
    while in_features % f.block_values:
        f = formats.get(f.fallback or "f16")
    return f.name


def quantize_(
    model: nn.Module, spec: Spec, filter_fn: Filter | None = None, progress: bool = True
) -> nn.Module:
    """Replace the Linear, Conv1D (GPT-2) and Embedding layers of `model` by packed ones, in place.

    spec: one format for every layer, embeddings and output head included, as llama.cpp and MLX do;
    or {pattern: format}, a layer taking the first pattern that matches its whole name: a glob where
    `*` also crosses dots ("*.mlp.*", "lm_head"), or, after "re:", a regular expression; None as the
    format leaves the layer dense, as does matching nothing; or spec(name, module) -> format | None.
    filter_fn(name, module) -> False leaves a layer dense.

    A weight that several layers share (tied embeddings) stays one tensor: it takes the first
    pattern that matches any of their names, or the format that spec gives any of them, and stays
    dense if filter_fn excludes one. A layer whose K the format's block does not divide gets
    resolve_format's choice, with a warning. Layers already packed are decoded and packed again if
    they are given another format. Layers whose weight the model reads itself (T5's `wo`) stay
    dense, with a warning, and so do experts stacked in one tensor.

    Each dense weight is freed once its packed one exists. Returns `model`.
    ValueError, before anything is changed: an unknown format, a pattern that matches no layer, two
    formats for one shared weight, a format that is only read, NaN or Inf in a weight, a weight on
    the meta device.
    """
    jobs = plan(model, spec, filter_fn)
    _check(jobs)
    warn_fallbacks(jobs)
    if filter_fn is None:
        warn_stacked(model, spec, jobs)
    with progress_bar(progress, sum(j.values for j in jobs), "Quantizing") as advance:
        while jobs:
            job = jobs.pop(0)
            job.put(model, quantize_weight(dense_weight(job.sites[0][1]), job.format))
            advance(job.values)
    _tell_transformers(model)
    return model


def _tell_transformers(model: nn.Module) -> None:
    """A transformers model learns of its packed layers, so that its save_pretrained works."""
    if is_transformers_model(model) and not quantized_by_another(model):
        attach(model)


@contextmanager
def progress_bar(show: bool, total: int, title: str) -> Iterator[Callable[[int], object]]:
    """A function to report `n` more values done; shows nothing when tqdm is missing."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        show = False
    if not show or total == 0:
        yield lambda n: None
        return
    with tqdm(total=total, desc=title, unit="w", unit_scale=True) as bar:
        yield bar.update


@dataclass
class Job:
    """One weight, the layers that hold it (each under one or more names) and its format."""

    sites: _Sites
    asked: str
    format: str

    @property
    def name(self) -> str:
        return self.sites[0][0]

    @property
    def values(self) -> int:
        n, k = weight_shape(self.sites[0][1])
        return n * k

    def put(self, model: nn.Module, weight: Tensor) -> None:
        """Replace the layers in the model by packed ones of this weight, uint8 [N, row_bytes]."""
        packed = nn.Parameter(weight, requires_grad=False)
        made: dict[int, nn.Module] = {}
        for name, module in self.sites:
            if id(module) not in made:
                made[id(module)] = pack_module(module, packed, self.format)
            model.set_submodule(name, made[id(module)])


def plan(model: nn.Module, spec: Spec, filter_fn: Filter | None = None) -> list[Job]:
    """What quantize_ would do. Weights are not read and may be on the meta device.

    ValueError: as quantize_, of all but the weights' values.
    """
    if packable(model):
        raise ValueError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; "
            "use QuantLinear.from_linear or QuantEmbedding.from_embedding"
        )
    if is_sharded(model):
        raise ValueError("model is sharded; quantize before shard_")
    if any(isinstance(module, LinearPart) for module in model.modules()):
        raise ValueError("model has merged layers; call unfuse_ first")
    chooser = _chooser(spec)
    groups = _shared_weights(model)
    jobs, read = [], []
    for sites in groups:
        wanted = chooser(sites)
        excluded = filter_fn is not None and not all(filter_fn(*site) for site in sites)
        if wanted is None or excluded:
            continue
        if not all(replaceable(model, name) for name, _ in sites):
            read.append(sites[0][0])
            continue
        format = resolve_format(wanted, weight_shape(sites[0][1])[1])
        if not all(getattr(module, "format", None) == format for _, module in sites):
            if not formats.get(format).packs:
                raise ValueError(f"{sites[0][0]}: {formats.get(format).refusal()}")
            jobs.append(Job(sites, wanted, format))
    if isinstance(chooser, _Patterns) and (unused := chooser.unused()):
        layers = [name for sites in groups for name, _ in sites]
        raise ValueError(
            f"spec: no layer is named {', '.join(map(repr, unused))}; the layers are "
            f"{', '.join(layers[:8])}{', ...' if len(layers) > 8 else ''}"
        )
    if read:
        warnings.warn(
            f"left dense, because the model reads their weight itself: {summary(read)}",
            stacklevel=3,
        )
    return jobs


def _shared_weights(model: nn.Module) -> list[_Sites]:
    """The packable layers grouped by the weight they hold, in the order of the model.

    A weight that some other kind of module holds too is left out: it cannot be packed for one only.
    """
    groups: dict[int, _Sites] = {}
    blocked: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if packable(module):
            groups.setdefault(id(module.weight), []).append((name, module))
        else:
            blocked.update(id(p) for p in module._parameters.values() if p is not None)
    return [sites for key, sites in groups.items() if key not in blocked]


class _Patterns:
    """{pattern: format} as a choice; remembers which patterns matched."""

    def __init__(self, spec: Mapping[str, str | None]) -> None:
        self.rules: list[tuple[str, Callable[[str], object], str | None]] = []
        for pattern, format in spec.items():
            name = None if format is None else formats.get(format).name
            self.rules.append((pattern, _matcher(pattern), name))
        self.used: set[str] = set()

    def __call__(self, sites: _Sites) -> str | None:
        hits = [
            (pattern, format)
            for pattern, match, format in self.rules
            if any(match(name) for name, _ in sites)
        ]
        self.used.update(pattern for pattern, _ in hits)
        return hits[0][1] if hits else None

    def unused(self) -> list[str]:
        return [pattern for pattern, _, _ in self.rules if pattern not in self.used]


def _matcher(pattern: str) -> Callable[[str], object]:
    if not pattern.startswith("re:"):
        return lambda name: fnmatchcase(name, pattern)
    try:
        return re.compile(pattern[3:]).fullmatch
    except re.error as error:
        raise ValueError(f"spec: {pattern!r} is not a regular expression: {error}") from None


def _chooser(spec: Any) -> Callable[[_Sites], str | None]:
    """The spec as a function from the layers that share a weight to the format it gets."""
    if isinstance(spec, str):
        name = formats.get(spec).name
        return lambda sites: name
    if isinstance(spec, Mapping):
        return _Patterns(spec)
    if callable(spec):
        return lambda sites: _asked(spec, sites)
    raise TypeError(f"spec must be a format name, a dict or a callable, got {type(spec).__name__}")


def _asked(spec: Callable[[str, nn.Module], Any], sites: _Sites) -> str | None:
    asked: dict[str, str] = {}
    for name, module in sites:
        choice = spec(name, module)
        if isinstance(choice, str):
            asked[formats.get(choice).name] = name
        elif choice is not None:
            raise TypeError(f"spec gives {name} {choice!r}; it must be a format name or None")
    if len(asked) > 1:
        given = ", ".join(f"{name} {format}" for format, name in asked.items())
        raise ValueError(f"one weight is shared, but spec gives {given}")
    return next(iter(asked), None)


def _check(jobs: list[Job]) -> None:
    """ValueError if a weight has no data, NaN or Inf. Reads every weight once, copies none."""
    for job in jobs:
        module = job.sites[0][1]
        if isinstance(module, QuantLinear | QuantEmbedding):
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        check_weight(f"{job.name}.weight", weight, job.format)


def check_weight(name: str, weight: Tensor, format: str) -> None:
    """ValueError if a dense weight cannot be packed: no data, not float, NaN, Inf, too large."""
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no data")
    if not weight.is_floating_point():
        raise ValueError(f"{name} must be float, got {weight.dtype}")
    largest = largest_magnitude(weight)
    if not isfinite(largest):
        raise ValueError(f"{name} has NaN or Inf")
    if format == "f16" and largest > _F16_MAX:
        raise ValueError(f"{name} has {largest:g}, too large for f16")


def warn_fallbacks(jobs: list[Job]) -> None:
    changed: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if job.format != job.asked:
            changed.setdefault((job.asked, job.format), []).append(job.name)
    if changed:
        parts = [f"{a} -> {b}: {summary(names)}" for (a, b), names in changed.items()]
        warnings.warn(
            "K is not a multiple of the format's block; used instead: " + "; ".join(parts),
            stacklevel=3,
        )


def warn_stacked(
    model: nn.Module, spec: Spec, jobs: list[Job], filter_fn: Filter | None = None
) -> None:
    """Warn of stacked experts that stay dense although the spec has a format for them."""
    if not isinstance(spec, str | Mapping):
        return  # a function may ask modules for what these have not
    chooser, left = _chooser(spec), {}
    for name, weight in stacked_weights(model).items():
        owner = name.rpartition(".")[0]
        site = owner, model.get_submodule(owner)
        if chooser([site]) is not None and (filter_fn is None or filter_fn(*site)):
            left[name] = weight.numel()
    if left:
        share = sum(left.values()) / (sum(left.values()) + sum(job.values for job in jobs))
        warnings.warn(
            f"left dense, {share:.0%} of the weights: experts stacked in one tensor, for which "
            f"there is no packed layer: {summary(list(left))}",
            stacklevel=3,
        )

"""Replacing the dense layers of a model by packed ones, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import isfinite

from torch import Tensor, nn

from .. import formats
from ..nn.fused import LinearPart
from ..nn.packed import quantize_weight
from ..nn.sharded import is_sharded
from .attach import attach, quantized_by_another
from .experts import Sites, Stack, dense_format, homes, unpackable
from .importance import Importance, columns_of
from .mixtures import MIXTURES, Mixture
from .replace import (
    check_model,
    dense_weight,
    largest_magnitude,
    pack_module,
    packable,
    replaceable,
    summary,
    weight_shape,
)
from .spec import Filter, Patterns, Spec, chooser_of, told

_F16_MAX = 65504.0


def resolve_format(format: str, in_features: int) -> str:
    """The format a weight of that K gets when `format` is asked for.

    `format` itself where K is a multiple of its block. Else q4_k gives q5_0, q5_k q5_1, q6_k q8_0,
    q2_k, q3_k and iq4_xs iq4_nl, tq1_0, tq2_0, q1_0 and q2_0 q4_0, nvfp4 mxfp4, mxfp8 q8_0, and
    affine the largest smaller group that divides K; where that does not fit either (K not a
    multiple of 32), f16. ValueError: unknown format.
    """
    f = formats.get(format)
    while in_features % f.block_values:
        f = formats.get(f.fallback or "f16")
    return f.name


def quantize_(
    model: nn.Module,
    spec: Spec,
    filter_fn: Filter | None = None,
    progress: bool = True,
    *,
    importance: Importance | None = None,
) -> nn.Module:
    """Replace the Linear, Conv1D (GPT-2) and Embedding layers of `model` by packed ones, in place,
    and the stacked experts of its mixtures.

    A name of a format may also be one of llama.cpp's mixtures of formats, "q3_k_s", "q3_k_m",
    "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s" or "q5_k_m": each layer gets what llama-quantize gives
    it, and routers and tables of positions stay dense.

    spec: one format for every layer, embeddings and output head included, as llama.cpp and MLX do;
    or {pattern: format}, a layer taking the first pattern that matches its whole name: a glob where
    `*` also crosses dots ("*.mlp.*", "lm_head"), or, after "re:", a regular expression; None as the
    format leaves the layer dense, as does matching nothing; or spec(name, module) -> format | None.
    filter_fn(name, module) -> False leaves a layer dense. A stack of experts has a format of its
    own, by its name ("*.experts.down_proj") or that of its module; a function gets the module.
    Where only one of a module's stacks is given a format, the others are rows of their own dtype.

    A weight that several layers share (tied embeddings) stays one tensor: it takes the first
    pattern that matches any of their names, or the format that spec gives any of them, and stays
    dense if filter_fn excludes one. A layer whose K the format's block does not divide gets
    resolve_format's choice, with a warning. Layers already packed are decoded and packed again if
    they are given another format. Layers whose weight the model reads itself (T5's `wo`) stay
    dense, with a warning, and so do stacked experts that compute what no QuantExperts does.

    importance: {layer: f32 [K], or what models.importance.importance gives it}, in the order of the
    layer's x; read_importance reads it from a file of llama.cpp's. Formats that search their scales
    then minimise the error that each column costs. Linear layers that it lacks are packed without,
    with a warning; of layers that share a weight one is enough.

    Each dense weight is freed once its packed one exists. Returns `model`.
    ValueError, before anything is changed: model is no module, an unknown format, a pattern that
    matches no layer, two formats for one shared weight, a format that is only read, NaN or Inf in a
    weight, a weight on the meta device, a layer with adapters, an importance of no layer or that is
    not f32 [K], finite and not negative.
    """
    jobs = plan(model, spec, filter_fn)
    if importance is not None:
        weigh(model, jobs, importance)
    _check(jobs)
    warn_fallbacks(jobs)
    if filter_fn is None:
        warn_stacked(model, spec, jobs)
    with progress_bar(progress, sum(j.values for j in jobs), "Quantizing") as advance:
        while jobs:
            job = jobs.pop(0)
            dense = dense_weight(job.sites[0][1])
            name = job.parameters[0]
            job.put(model, quantize_weight(dense, job.format, job.importance, name))
            advance(job.values)
    if not quantized_by_another(model):
        attach(model)  # makes save_pretrained of the model work
    return model


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

    sites: Sites
    asked: str
    format: str
    importance: Tensor | None = None  # f32 [K] on the CPU

    @property
    def name(self) -> str:
        return self.sites[0][0]

    @property
    def values(self) -> int:
        n, k = weight_shape(self.sites[0][1])
        return n * k

    @property
    def parameters(self) -> list[str]:
        """The names of the weight in the model's state_dict."""
        stack = isinstance(self.sites[0][1], Stack)
        return [name if stack else f"{name}.weight" for name, _ in self.sites]

    def put(self, model: nn.Module, weight: Tensor) -> None:
        """Replace the layers in the model by packed ones of this weight, uint8 [N, row_bytes]."""
        first = self.sites[0][1]
        if isinstance(first, Stack):
            first.put(model, [name for name, _ in self.sites], weight, self.format)
            return
        packed = nn.Parameter(weight, requires_grad=False)
        made: dict[int, nn.Module] = {}
        for name, module in self.sites:
            if id(module) not in made:
                made[id(module)] = pack_module(module, packed, self.format)
            model.set_submodule(name, made[id(module)])


def weigh(model: nn.Module, jobs: list[Job], importance: Importance) -> None:
    """Give the jobs the importance of their layers. Warns of linear layers that have none.

    ValueError: a name is of no packable layer, or what it has is not as quantize_ says.
    """
    layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if packable(m)}
    found = {}
    for name, given in importance.items():
        if name not in layers:
            raise ValueError(f"importance: the model has no linear layer {name!r}")
        found[name] = columns_of(name, given, weight_shape(layers[name])[1])
    for job in jobs:
        each = [found[name] for name, _ in job.sites if found.get(name) is not None]
        job.importance = next(iter(each), None)
    without = [
        job.name
        for job in jobs
        if job.importance is None
        and formats.get(job.format).weighs
        and not any(isinstance(module, nn.Embedding) for _, module in job.sites)
    ]
    if without:
        warnings.warn(f"packed without an importance: {summary(without)}", stacklevel=3)


def plan(
    model: nn.Module, spec: Spec, filter_fn: Filter | None = None, apart: Container[str] = ()
) -> list[Job]:
    """The jobs that quantize_ would do. Weights are not read and may be on the meta device.

    apart: names of experts whose gate and up become stacks of their own.
    ValueError: as quantize_, of all but the weights' values.
    """
    check_model(model)
    if packable(model):
        raise ValueError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; "
            "use QuantLinear.from_linear or QuantEmbedding.from_embedding"
        )
    if is_sharded(model):
        raise ValueError("model is sharded; quantize before shard_")
    if any(isinstance(module, LinearPart) for module in model.modules()):
        raise ValueError("model has merged layers; call unfuse_ first")
    chooser = chooser_of(spec)
    groups = _shared_weights(model, apart)
    mixture = cache(lambda: Mixture(model, groups))  # which few calls ask for
    jobs, read = [], []
    for sites in groups:
        wanted = chooser(sites)
        if wanted in MIXTURES:
            wanted = mixture().format(wanted, sites, weight_shape(sites[0][1])[1])
        excluded = filter_fn is not None and not all(filter_fn(*told(site)) for site in sites)
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
    if isinstance(chooser, Patterns) and (unused := chooser.unused()):
        layers = [name for sites in groups for name, _ in sites]
        raise ValueError(
            f"spec: no layer is named {', '.join(map(repr, unused))}; the layers are "
            f"{', '.join(layers[:8])}{', ...' if len(layers) > 8 else ''}"
        )
    jobs += _other_stacks(groups, jobs)
    _refuse_adapted(model, jobs)
    if read:
        warnings.warn(
            f"left dense, because the model reads their weight itself: {summary(read)}",
            stacklevel=3,
        )
    return jobs


def _refuse_adapted(model: nn.Module, jobs: list[Job]) -> None:
    """ValueError: a job is of a layer under an adapter of PEFT, or of the adapter's own layers.

    PEFT chooses the adapter's class by that of the layer, and casts x to the dtype of its lora_A.
    """
    adapted = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for job in jobs:
        for name, _ in job.sites:
            parts = name.split(".")
            if any(".".join(parts[:i]) in adapted for i in range(1, len(parts))):
                raise ValueError(
                    f"{name} is of a layer with adapters; pack the model before it gets them, or "
                    "unload them first"
                )


def _other_stacks(groups: list[Sites], jobs: list[Job]) -> list[Job]:
    """Jobs for the stacks that nothing is asked for, of experts of which another is packed."""
    asked = [job.sites[0][1] for job in jobs]
    homes = {id(stack.home) for stack in asked if isinstance(stack, Stack)}
    taken, others = {id(stack) for stack in asked}, []
    for sites in groups:
        stack = sites[0][1]
        if not isinstance(stack, Stack) or id(stack.home) not in homes or id(stack) in taken:
            continue
        if stack.format is None:
            same = dense_format(stack.weight)
            others.append(Job(sites, same, same))
    return others


def _shared_weights(model: nn.Module, apart: Container[str] = ()) -> list[Sites]:
    """The packable layers grouped by the weight they hold, in the order of the model.

    A weight that some other kind of module holds too is left out: it cannot be packed for one only.
    """
    groups: dict[object, Sites] = {}
    blocked: set[object] = set()
    experts = homes(model, apart)
    for name, module in model.named_modules(remove_duplicate=False):
        if packable(module):
            groups.setdefault(id(module.weight), []).append((name, module))
        elif name in experts:
            for leaf, stack in experts[name].stacks.items():
                groups.setdefault((id(module), leaf), []).append((f"{name}.{leaf}", stack))
        else:
            blocked.update(id(p) for p in module._parameters.values() if p is not None)
    return [sites for key, sites in groups.items() if key not in blocked]


def _check(jobs: list[Job]) -> None:
    """ValueError if a weight has no data, NaN or Inf, or a value too large for its format.

    Reads every weight once, and copies none but those of values beyond f16, which it packs.
    """
    for job in jobs:
        module, name = job.sites[0][1], job.parameters[0]
        packed = getattr(module, "format", None) is not None
        if not packed and check_weight(name, module.weight) > _F16_MAX:
            quantize_weight(dense_weight(module), job.format, job.importance, name)


def check_weight(name: str, weight: Tensor) -> float:
    """The largest magnitude. ValueError: no data, not float, NaN, Inf."""
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no data")
    if not weight.is_floating_point():
        raise ValueError(f"{name} must be float, got {weight.dtype}")
    largest = largest_magnitude(weight)
    if not isfinite(largest):
        raise ValueError(f"{name} has NaN or Inf")
    return largest


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
    chooser, left = chooser_of(spec), {}
    for name, weight in unpackable(model).items():
        owner = name.rpartition(".")[0]
        site = owner, model.get_submodule(owner)
        if chooser([site]) is not None and (filter_fn is None or filter_fn(*site)):
            left[name] = weight.numel()
    if left:
        share = sum(left.values()) / (sum(left.values()) + sum(job.values for job in jobs))
        warnings.warn(
            f"left dense, {share:.0%} of the weights: stacked experts that compute what no packed "
            f"layer does: {summary(list(left))}",
            stacklevel=3,
        )

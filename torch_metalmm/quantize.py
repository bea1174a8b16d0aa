"""Replacing the dense layers of a model by packed ones, in place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from . import formats
from .linear import QuantEmbedding, QuantLinear, dense_weight, quantize_weight

Spec = str | Mapping[str, str | None] | Callable[[str, nn.Module], str | None]
Filter = Callable[[str, nn.Module], bool]

# llama.cpp's choice for a K that super-blocks of 256 values do not divide.
_FALLBACK = {
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}


def resolve_format(format: str, in_features: int) -> str:
    """The format a weight of that K gets when `format` is asked for.

    `format` itself where K is a multiple of its block. Else q4_k gives q5_0, q5_k q5_1, q6_k q8_0,
    q2_k, q3_k and iq4_xs iq4_nl, and affine the largest smaller group that divides K; where that
    does not fit either (K not a multiple of 32), f16. ValueError: unknown format.
    """
    spec = formats.get(format)
    choices = [spec.name, _FALLBACK.get(spec.name, "f16"), "f16"]
    if affine := re.fullmatch(r"(affine\d_g)(\d+)(.*)", spec.name):
        head, group, tail = affine.groups()
        smaller = [f"{head}{g}{tail}" for g in (64, 32) if g < int(group)]
        choices = [spec.name, *smaller, "f16"]
    return next(c for c in choices if in_features % formats.get(c).block_values == 0)


def quantize_(
    model: nn.Module, spec: Spec, filter_fn: Filter | None = None, progress: bool = True
) -> nn.Module:
    """Replace the Linear, Conv1D (GPT-2) and Embedding layers of `model` by packed ones, in place.

    spec: one format for every layer, embeddings and output head included, as llama.cpp and MLX do;
    or {pattern: format}, a layer taking the first pattern that matches its whole name: a glob where
    `*` also crosses dots ("*.mlp.*", "lm_head"), or, after "re:", a regular expression; None as the
    format leaves the layer dense, as does matching nothing; or spec(name, module) -> format | None.
    filter_fn(name, module) -> False leaves a layer dense.

    A weight that several layers share (tied embeddings) stays one tensor: it takes the format that
    any of them is given, and stays dense if a None pattern or filter_fn excludes one of them. A
    layer whose K the format's block does not divide gets resolve_format's choice, with a warning.
    Layers already packed are decoded and packed again if they are given another format. Layers the
    model keeps in f32 by name (T5's `wo`) stay dense.

    Each dense weight is freed once its packed one exists. Returns `model`.
    ValueError, before anything is changed: an unknown format, a pattern that matches no layer, two
    formats for one shared weight, NaN or Inf in a weight, a weight on the meta device.
    """
    jobs = _plan(model, spec, filter_fn)
    _check(jobs)
    _warn_fallbacks(jobs)
    with progress_bar(progress, sum(j.values for j in jobs), "Quantizing") as advance:
        while jobs:
            job = jobs.pop(0)
            _replace(model, job)
            advance(job.values)
    return model


def packable(module: nn.Module) -> bool:
    """Whether a packed layer can take this module's place without changing what it computes."""
    if isinstance(module, QuantLinear | QuantEmbedding):
        return True
    if isinstance(module, nn.Embedding):
        # A subclass may compute something else; one that scales the rows is known (Gemma, BART).
        plain = type(module) is nn.Embedding or hasattr(module, "embed_scale")
        return plain and module.max_norm is None
    # Exact type: some subclasses hand their weight to other code (nn.MultiheadAttention).
    return type(module) is nn.Linear or _is_conv1d(module)


def kept_in_f32(model: nn.Module, name: str) -> bool:
    """Whether the model asks to keep the layer of that name in f32, whatever its dtype.

    Such models convert activations to `weight.dtype` before the call, which bytes do not have.
    """
    keep: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        keep.update(getattr(model, attribute, None) or ())
    return not keep.isdisjoint(name.split("."))


def pack_module(module: nn.Module, weight: Tensor, k: int, format: str) -> nn.Module:
    """The packed layer with this weight that stands in for `module` (see `packable`)."""
    new: nn.Module
    if isinstance(module, nn.Embedding):
        dtype = module.dtype if isinstance(module, QuantEmbedding) else module.weight.dtype
        scale = getattr(module, "embed_scale", None)
        new = QuantEmbedding.from_packed(weight, k, format, module.padding_idx, dtype, scale)
    else:
        bias = module.bias
        assert bias is None or isinstance(bias, Tensor)
        new = QuantLinear.from_packed(weight, k, format, bias)
    return new.train(module.training)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(N, K) of a packable layer."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1], weight.shape[0]


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
class _Job:
    """One weight, the layers that hold it (each under one or more names) and its format."""

    sites: list[tuple[str, nn.Module]]
    asked: str
    format: str

    @property
    def name(self) -> str:
        return self.sites[0][0]

    @property
    def values(self) -> int:
        n, k = weight_shape(self.sites[0][1])
        return n * k


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _plan(model: nn.Module, spec: Spec, filter_fn: Filter | None) -> list[_Job]:
    if packable(model):
        raise ValueError(
            f"model is itself a {type(model).__name__}, which cannot be replaced in place; "
            "use QuantLinear.from_linear or QuantEmbedding.from_embedding"
        )
    chooser = _chooser(spec)
    jobs = []
    for sites in _shared_weights(model):
        if any(kept_in_f32(model, name) for name, _ in sites):
            continue
        if filter_fn is not None and not all(filter_fn(name, m) for name, m in sites):
            continue
        choices = [chooser(name, m) for name, m in sites]
        asked = {formats.get(c).name for c in choices if isinstance(c, str)}
        if not asked or _DENSE in choices:
            continue
        names = [name for name, _ in sites]
        if len(asked) > 1:
            raise ValueError(
                f"{', '.join(names)} share one weight but are given {', '.join(sorted(asked))}; "
                "give them one format"
            )
        wanted = asked.pop()
        format = resolve_format(wanted, weight_shape(sites[0][1])[1])
        if all(getattr(m, "format", None) == format for _, m in sites):
            continue
        jobs.append(_Job(sites, wanted, format))
    unused = chooser.unused() if isinstance(chooser, _Patterns) else []
    if unused:
        layers = [name for sites in _shared_weights(model) for name, _ in sites]
        raise ValueError(
            f"spec: no Linear or Embedding is named {', '.join(map(repr, unused))}; the layers are "
            f"{', '.join(layers[:8])}{', ...' if len(layers) > 8 else ''}"
        )
    return jobs


def _shared_weights(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The packable layers grouped by the weight they hold, in the order of the model.

    A weight that some other kind of module holds too is left out: it cannot be packed for one only.
    """
    groups: dict[int, list[tuple[str, nn.Module]]] = {}
    blocked: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if packable(module):
            groups.setdefault(id(module.weight), []).append((name, module))
        else:
            blocked.update(id(p) for p in module._parameters.values() if p is not None)
    return [sites for key, sites in groups.items() if key not in blocked]


_DENSE = object()  # a pattern says None: keep dense, which is more than not being matched


class _Patterns:
    """{pattern: format} as a function of a layer's name; remembers which patterns matched."""

    def __init__(self, spec: Mapping[str, str | None]) -> None:
        self.rules: list[tuple[str, Callable[[str], object], str | None]] = []
        for pattern, format in spec.items():
            if format is not None:
                formats.get(format)
            self.rules.append((pattern, _matcher(pattern), format))
        self.used: set[str] = set()

    def __call__(self, name: str, module: nn.Module) -> str | object | None:
        hits = [(pattern, format) for pattern, match, format in self.rules if match(name)]
        self.used.update(pattern for pattern, _ in hits)
        if not hits:
            return None
        return _DENSE if hits[0][1] is None else hits[0][1]

    def unused(self) -> list[str]:
        return [pattern for pattern, _, _ in self.rules if pattern not in self.used]


def _matcher(pattern: str) -> Callable[[str], object]:
    if not pattern.startswith("re:"):
        return lambda name: fnmatchcase(name, pattern)
    try:
        return re.compile(pattern[3:]).fullmatch
    except re.error as error:
        raise ValueError(f"spec: {pattern!r} is not a regular expression: {error}") from None


def _chooser(spec: Any) -> Callable[[str, nn.Module], str | object | None]:
    if isinstance(spec, str):
        name = formats.get(spec).name
        return lambda _name, _module: name
    if isinstance(spec, Mapping):
        return _Patterns(spec)
    if callable(spec):
        return spec  # type: ignore[no-any-return]
    raise TypeError(f"spec must be a format name, a dict or a callable, got {type(spec).__name__}")


def _check(jobs: list[_Job]) -> None:
    """ValueError if a weight has no data, NaN or Inf. Reads every weight once, copies none."""
    for job in jobs:
        module = job.sites[0][1]
        if isinstance(module, QuantLinear | QuantEmbedding):
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        if weight.is_meta:
            raise ValueError(f"{job.name}.weight is on the meta device and has no data")
        if not weight.is_floating_point():
            raise ValueError(f"{job.name}.weight must be float, got {weight.dtype}")
        if weight.numel() == 0:
            continue
        low, high = torch.aminmax(weight.detach())
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ValueError(f"{job.name}.weight has NaN or Inf")


def _warn_fallbacks(jobs: list[_Job]) -> None:
    changed: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if job.format != job.asked:
            changed.setdefault((job.asked, job.format), []).append(job.name)
    if changed:
        parts = [f"{a} -> {b}: {', '.join(names)}" for (a, b), names in changed.items()]
        warnings.warn(
            "K is not a multiple of the format's block; used instead: " + "; ".join(parts),
            stacklevel=3,
        )


def _replace(model: nn.Module, job: _Job) -> None:
    first = job.sites[0][1]
    k = weight_shape(first)[1]
    packed = nn.Parameter(quantize_weight(dense_weight(first), job.format), requires_grad=False)
    made: dict[int, nn.Module] = {}
    for name, module in job.sites:
        if id(module) not in made:
            made[id(module)] = pack_module(module, packed, k, job.format)
        model.set_submodule(name, made[id(module)])

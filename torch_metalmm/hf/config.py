"""MetalMMConfig: what the method "metalmm" is asked to pack, and what a stored model has packed."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..extras import require
from ..files.folder import QUANT_METHOD
from ..models.activations import stored_activations
from ..models.mixtures import resolve
from ..models.spec import Spec
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.activations import check_kind
from ..nn.experts import GATE, GATE_UP, UP
from ..nn.sharded import Sharded

require("MetalMMConfig", "transformers")
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402


class _Method(str, enum.Enum):
    """diffusers asks a config for quant_method.value."""

    METALMM = QUANT_METHOD

    __str__ = str.__str__


class MetalMMConfig(QuantizationConfigMixin):
    """The formats that the layers of a model of transformers or diffusers get.

        AutoModel.from_pretrained(folder, quantization_config=MetalMMConfig("q4_k"))

    format: what every Linear, Conv1D, Embedding and stack of experts gets that nothing else names,
    output head and embeddings included, as quantize_, llama.cpp and MLX do; None: they stay dense.
    modules: {pattern: format or None}, patterns as in quantize_; the first that matches counts.
    skip: layers to leave dense: a name, or a part of one between dots, or a glob of either
    ("lm_head", "layers.0", "*.mlp.down_*"). A weight tied to a skipped layer stays dense too.
    activations: "int8" or "int16", as activations_ says it; or {name of a layer: one of them or
    None}.
    importance: the path of an importance matrix, as read_importance reads it; read while a dense
    model is loaded, and not stored.

    In config.json of a stored model, modules has the exact name and format of every packed layer
    and stack of experts (gate_proj and up_proj where a file had these apart), None for a dense one
    that the model's config ties to a packed one, and input_order the names of those that gather
    their input (see QuantLinear).
    ValueError: an unknown format or key, a value of the wrong type, nothing to pack.
    """

    def __init__(
        self,
        format: str | None = None,
        modules: Mapping[str, str | None] | None = None,
        skip: Iterable[str] | str = (),
        input_order: Iterable[str] = (),
        activations: str | Mapping[str, str | None] | None = None,
        importance: str | os.PathLike[str] | None = None,
        **other: Any,
    ) -> None:
        method = other.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ValueError(f"quant_method must be {QUANT_METHOD!r}, got {method!r}")
        if other:
            raise ValueError(
                f"unknown keys {sorted(other)}; there are format, modules, skip, input_order, "
                "activations, importance"
            )
        self.quant_method = _Method.METALMM  # type: ignore[assignment]  # theirs has no plug-ins
        self.format = None if format is None else _format("format", format)
        self.modules = _modules({} if modules is None else modules)
        self.skip = _names("skip", [skip] if isinstance(skip, str) else skip)
        self.input_order = _names("input_order", input_order)
        self.activations = _activations(activations)
        if not isinstance(importance, str | os.PathLike | None):
            raise ValueError(f"importance must be a path, got {type(importance).__name__}")
        self.importance = None if importance is None else os.fspath(importance)
        if self.format is None and not any(self.modules.values()):
            raise ValueError("MetalMMConfig names no format: give one, as in MetalMMConfig('q4_k')")

    def to_dict(self) -> dict[str, Any]:
        """The entry of config.json: the method and every field that is set."""
        fields = {key: value for key, value in super().to_dict().items() if value}
        return fields | {"quant_method": QUANT_METHOD}

    def spec(self) -> Spec:
        """format and modules as quantize_ takes them."""
        if self.format is None or "*" in self.modules:
            return self.modules
        return {**self.modules, "*": self.format}

    def skip_filter(self, model: nn.Module) -> Any:
        """skip as the filter_fn of quantize_. ValueError: an entry names no module of the model."""
        names = site_names(model)
        for entry in self.skip:
            if not any(_names_part_of(entry, name) for name in names):
                raise ValueError(f"skip: the model has no module named {entry!r}")
        return lambda name, module: not any(_names_part_of(entry, name) for entry in self.skip)


def stored_config(model: nn.Module) -> MetalMMConfig | None:
    """The config that says which layers of `model` are packed; None if no layer is."""
    packed: dict[str, Any] = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantLinear | QuantEmbedding | QuantExperts)
        and (not isinstance(module, Sharded) or module.shard.dense is None)
    }
    if not packed:
        return None
    gathers = [n for n, m in packed.items() if getattr(m, "input_order", None) is not None]
    modules: dict[str, str | None] = {}
    for name, module in packed.items():
        if isinstance(module, QuantExperts):
            modules |= {f"{name}.{stack}": format for stack, format in module.formats.items()}
        else:
            modules[name] = module.format
    # The config's ties: loading takes pairs that are not tied out of all_tied_weights_keys.
    expand: Any = getattr(model, "get_expanded_tied_weights_keys", None)
    ties: dict[str, str] = {} if expand is None else expand(all_submodels=True)
    for pair in ties.items():
        owners = {name.removesuffix(".weight") for name in pair if name.endswith(".weight")}
        if len(owners & packed.keys()) == 1:
            modules |= dict.fromkeys(owners - packed.keys())
    kinds = stored_activations(model)
    return MetalMMConfig(modules=modules, input_order=gathers, activations=kinds)


def site_names(model: nn.Module) -> list[str]:
    """The names of what may be packed, and of what holds it: modules, and stacks of experts."""
    names = []
    for name, module in model.named_modules(remove_duplicate=False):
        stacks = [leaf for leaf, p in module._parameters.items() if p is not None and p.dim() == 3]
        if GATE_UP in stacks:
            stacks += [GATE, UP]
        names += [name, *(f"{name}.{leaf}" for leaf in stacks)]
    return names


def _names_part_of(entry: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{entry}.*")


def _format(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be the name of a format, got {value!r}")
    try:
        return resolve(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _modules(value: Any) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise ValueError(f"modules must be {{pattern: format}}, got {type(value).__name__}")
    return {
        str(name): None if format is None else _format(f"modules[{name!r}]", format)
        for name, format in value.items()
    }


def _activations(value: Any) -> str | dict[str, str | None] | None:
    if not isinstance(value, Mapping):
        check_kind(value)
        return value
    for name, kind in value.items():
        check_kind(kind, f"activations[{name!r}]")
    return {str(name): kind for name, kind in value.items()}


def _names(where: str, value: Any) -> list[str]:
    names = list(value) if isinstance(value, Iterable) else [value]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{where} must be names of layers, got {name!r}")
    return names

"""MetalMMConfig: what the method "metalmm" is asked to pack, and what a stored model has packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .. import formats
from ..extras import require
from ..files.folder import QUANT_METHOD
from ..models.activations import stored_activations
from ..models.quantize import Spec
from ..nn import QuantEmbedding, QuantLinear
from ..nn.activations import check_kind
from ..nn.sharded import Sharded

require("MetalMMConfig", "transformers")
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402


class MetalMMConfig(QuantizationConfigMixin):
    """Which layer of a transformers model gets which format.

        AutoModel.from_pretrained(folder, quantization_config=MetalMMConfig("q4_k"))

    format: what every Linear, Conv1D and Embedding gets that nothing else names, output head and
    embeddings included, as in quantize_, llama.cpp and MLX; None leaves these layers dense.
    modules: {pattern: format or None}, patterns as in quantize_; the first that matches counts.
    skip: layers to leave dense: a name, or a part of one between dots, or a glob of either
    ("lm_head", "layers.0", "*.mlp.down_*"). A weight tied to a skipped layer stays dense too.
    activations: "int8", as activations_ says it; or {name of a layer: "int8" or None}.

    In config.json of a stored model, modules has the exact name and format of every packed layer,
    None for a dense one that the model's config ties to a packed one, and input_order the names of
    those that gather their input (see QuantLinear).
    ValueError: an unknown format or key, a value of the wrong type, nothing to pack.
    """

    def __init__(
        self,
        format: str | None = None,
        modules: Mapping[str, str | None] | None = None,
        skip: Iterable[str] | str = (),
        input_order: Iterable[str] = (),
        activations: str | Mapping[str, str | None] | None = None,
        **other: Any,
    ) -> None:
        method = other.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ValueError(f"quant_method must be {QUANT_METHOD!r}, got {method!r}")
        if other:
            raise ValueError(
                f"unknown keys {sorted(other)}; there are format, modules, skip, input_order, "
                "activations"
            )
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # a plug-in is in no enum
        self.format = None if format is None else _format("format", format)
        self.modules = _modules({} if modules is None else modules)
        self.skip = _names("skip", [skip] if isinstance(skip, str) else skip)
        self.input_order = _names("input_order", input_order)
        self.activations = _activations(activations)
        if self.format is None and not any(self.modules.values()):
            raise ValueError("MetalMMConfig names no format: give one, as in MetalMMConfig('q4_k')")

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: the method and every field that is set."""
        return {key: value for key, value in super().to_dict().items() if value}

    def spec(self) -> Spec:
        """format and modules as quantize_ takes them."""
        if self.format is None or "*" in self.modules:
            return self.modules
        return {**self.modules, "*": self.format}

    def skip_filter(self, model: nn.Module) -> Any:
        """skip as the filter_fn of quantize_. ValueError: an entry names no module of the model."""
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for entry in self.skip:
            if not any(_names_part_of(entry, name) for name in names):
                raise ValueError(f"skip: the model has no module named {entry!r}")
        return lambda name, module: not any(_names_part_of(entry, name) for entry in self.skip)


def stored_config(model: nn.Module) -> MetalMMConfig | None:
    """The config that says which layers of `model` are packed; None if no layer is."""
    packed = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantLinear | QuantEmbedding)
        and (not isinstance(module, Sharded) or module.shard.dense is None)
    }
    if not packed:
        return None
    gathers = [n for n, m in packed.items() if getattr(m, "input_order", None) is not None]
    modules: dict[str, str | None] = {n: m.format for n, m in packed.items()}
    # The config's ties: loading takes pairs that are not tied out of all_tied_weights_keys.
    expand: Any = getattr(model, "get_expanded_tied_weights_keys", None)
    ties: dict[str, str] = {} if expand is None else expand(all_submodels=True)
    for pair in ties.items():
        owners = {name.removesuffix(".weight") for name in pair if name.endswith(".weight")}
        if len(owners & packed.keys()) == 1:
            modules |= dict.fromkeys(owners - packed.keys())
    kinds = stored_activations(model)
    return MetalMMConfig(modules=modules, input_order=gathers, activations=kinds)


def _names_part_of(entry: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{entry}.*")


def _format(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be the name of a format, got {value!r}")
    try:
        return formats.get(value).name
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
        return value  # type: ignore[no-any-return]
    for name, kind in value.items():
        check_kind(kind, f"activations[{name!r}]")
    return {str(name): kind for name, kind in value.items()}


def _names(where: str, value: Any) -> list[str]:
    names = list(value) if isinstance(value, Iterable) else [value]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"{where} must be names of layers, got {name!r}")
    return names

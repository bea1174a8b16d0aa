"""The entries of a plan: styles of layers, and the part of each layer that a rank gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ... import formats
from ...nn import QuantEmbedding, QuantLinear
from ...nn.sharded import Ranges
from ..replace import is_conv1d, packable, replaceable
from .split import Heads

COLUMNWISE, ROWWISE = "colwise", "rowwise"
GATHERED, SPLIT_INPUT = "colwise_gather_output", "rowwise_split_input"
VOCABULARY = "embedding_rowwise"
REPLICATED = "replicate"
# Other names that transformers has for these styles.
_SAME = {
    "colwise_rep": GATHERED,
    "rowwise_rep": SPLIT_INPUT,
    "replicated_with_grad_allreduce": REPLICATED,
    "local_params": REPLICATED,
}
STYLES = (COLUMNWISE, ROWWISE, GATHERED, SPLIT_INPUT, VOCABULARY, REPLICATED)


@dataclass(frozen=True)
class Part:
    """The division of one layer: ranges of its rows or columns by rank."""

    style: str
    ranges: Ranges
    heads: Heads | None = None  # heads of the attention that this layer ends

    @property
    def rows(self) -> bool:
        return self.style not in (ROWWISE, SPLIT_INPUT)


@dataclass
class Plan:
    """Parts by the names of layers, and why layers that the plan names are replicated."""

    parts: dict[str, Part] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    def replicate(self, names: Any, why: str) -> None:
        for name in names:
            self.parts.pop(name, None)
            self.whole.setdefault(name, why)


def our_style(style: str) -> str:
    """The style of STYLES that transformers has under that name; the name itself if it has none."""
    return _SAME.get(style, style)


def layer_of(model: nn.Module, name: str) -> tuple[Any, str | None]:
    """The layer of that name, and why it is not divided."""
    try:
        module: Any = model.get_submodule(name)
    except AttributeError:
        return None, "it is no layer but a parameter"
    if not packable(module):
        return module, f"it is a {type(module).__name__}"
    if is_conv1d(module):
        return module, "it is a dense Conv1D"
    if not isinstance(module, QuantLinear | QuantEmbedding):
        if module.weight.dtype not in formats.DTYPE_NAMES:
            return module, f"its weight is {module.weight.dtype}"
        if not replaceable(model, name):
            return module, "the model computes with its weight, or keeps it in float32"
    return module, None


def block_of(module: Any) -> int:
    """Values of K that belong together."""
    return formats.get(format_of(module)).block_values


def format_of(module: Any) -> str:
    """The format of a layer; of a dense one that of its dtype."""
    format: str | None = getattr(module, "format", None)
    return format or formats.DTYPE_NAMES[module.weight.dtype]


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def feeds(owner: nn.Module, layers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The linear layers of the owner that are none of `layers`, by their own names."""
    known = {id(layer) for layer in layers.values()}
    for name, child in owner.named_children():
        if packable(child) and not isinstance(child, nn.Embedding) and id(child) not in known:
            yield name, child


def other_tensors(owner: nn.Module, layers: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the owner that belong to no linear layer of its own: norms, sinks, ..."""
    yield from owner.named_parameters(recurse=False)
    linear = {name for name, _ in feeds(owner, {})}
    known = {id(layer) for layer in layers.values()}
    for name, child in owner.named_children():
        if name not in linear and id(child) not in known:
            for parameter, tensor in child.named_parameters():
                yield f"{name}.{parameter}", tensor

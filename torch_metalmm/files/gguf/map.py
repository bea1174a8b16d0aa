"""The places of a GGUF file's tensors in a transformers model, and what is undone on the way.

Names are the gguf package's, and of three architectures transformers'; transformers' processors
undo what llama.cpp's converter did, or those of processors.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layout import TensorMap
from .rows import STORED_AS, Architecture, all_rows


def tensor_map(
    architecture: str, model: Any, row: Architecture, values: dict[str, Any]
) -> TensorMap:
    """The map for files of the architecture; transformers has an old and a new kind."""
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

    if architecture in GGUF_ARCHS:
        return _ConversionMap(architecture, model, GGUF_ARCHS[architecture](model.config))
    return _ProcessorMap(architecture, model, values, row)


def arch_of(architecture: str) -> Any:
    """gguf's number of an architecture that it knows."""
    return _arches()[architecture]


def _arches() -> dict[str, Any]:
    from gguf import MODEL_ARCH_NAMES

    return {name: arch for arch, name in MODEL_ARCH_NAMES.items()}


def gguf_names(model: Any, layers: Iterable[str], whole: bool = False) -> dict[str, str]:
    """{tensor of GGUF files: the layer of the transformers model whose weight has its rows}.

    whole: of layers that files have in several tensors, older files' name of one, too.
    ValueError: gguf knows no architecture of the model's type.
    """
    from gguf import get_tensor_name_map

    given = model.config.get_text_config().model_type
    kind = given.removesuffix("_text")
    rows = [(name, row) for name, row in all_rows() if row.model_type == given]
    spellings = [name for name, _ in rows]
    spellings += [kind, kind.replace("_", "-"), kind.replace("_", ""), STORED_AS.get(kind, kind)]
    arches = _arches()
    found = next((name for name in spellings if name in arches), None)
    if found is None:
        raise ValueError(f"gguf has no architecture for models of the type {kind!r}")
    known = get_tensor_name_map(arches[found], model.config.get_text_config().num_hidden_layers)
    own = _names_of(model, [row for _, row in rows])
    named: dict[str, str] = {}
    for layer in layers:
        leaves = next((own[end] for end in own if f"{layer}.weight".endswith(f".{end}")), None)
        # gguf has names of models with a head alone for some layers.
        name = known.get_name(layer) or known.get_name(f"model.{layer}")
        if leaves is not None:
            named |= {f"blk.{layer_of(layer)}.{leaf}": layer for leaf in leaves}
        if name is not None and (leaves is None or whole):
            named[f"{name}.weight"] = layer
    return named


def _names_of(model: Any, rows: Iterable[Architecture]) -> dict[str, tuple[str, ...]]:
    """{end of a name in the model: ends in the file}, of that row of which the model has most."""
    weights = [*model.state_dict()]

    def fits(row: Architecture) -> tuple[int, int]:
        count = sum(any(w.endswith(f".{end}") for w in weights) for end in row.names)
        return count - len(row.names), count

    best = max(rows, key=fits, default=Architecture(""))
    joined = {end: tuple(leaves) for end, leaves in best.joined.items()}
    return {end: (leaf,) for end, leaf in best.names.items()} | joined


def layer_of(name: str) -> int | None:
    """The number of the layer that a name of the model is in."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


class _ProcessorMap(TensorMap):
    """The architectures of modeling_gguf_pytorch_utils: a name table and a TensorProcessor."""

    def __init__(
        self, architecture: str, model: Any, values: dict[str, Any], row: Architecture
    ) -> None:
        from transformers import modeling_gguf_pytorch_utils as theirs

        from . import processors

        super().__init__()
        kind = getattr(processors, row.processor, None) or getattr(theirs, row.processor)
        self._processor: Any = kind(config=values)
        own = "t5" if "t5" in architecture else architecture
        self._names = theirs.get_gguf_hf_weights_map(
            _Shallow(model), self._processor, model_type=own
        )
        self._own = set(row.names.values())
        targets = list(model.state_dict())
        for leaf, end in row.leaves:
            for target in (t for t in targets if t.endswith(end)):
                self._names[f"blk.{layer_of(target)}.{leaf}"] = target
        self._sources = {
            target: {
                f"blk.{layer_of(target)}.{leaf}": rows(model.config)
                for leaf, rows in leaves.items()
            }
            for end, leaves in row.joined.items()
            for target in targets
            if target.endswith(end)
        }
        self._needed: dict[str, set[str]] = {}  # by target, names without ".weight"
        for name, target in self._names.items():
            self._needed.setdefault(target, set()).add(name.removesuffix(".weight"))
        self._given: set[str] = set()

    def names(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, target in self._names.items():
            if isinstance(target, str) and name.split(".", 2)[-1] in self._own:
                found[target] = name
            elif isinstance(target, str):
                # Tables of transformers have names of parameters without their kind; of two
                # layouts gguf's own name is that of one.
                full = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
                found.setdefault(target, full)
        return found

    def target(self, name: str) -> str | None:
        # Stacked experts are listed without ".weight".
        found = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
        return found if isinstance(found, str) else None

    def sources(self, target: str) -> dict[str, int]:
        return self._sources.get(target, {})

    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
        joined = self.target(name) or ""
        sources = self.sources(joined)
        if name in sources:
            if len(value) != sources[name]:
                return {}
            parts = self._open.setdefault(joined, {})
            parts[name] = value
            if len(parts) < len(sources):
                return {}
            del self._open[joined]
            name, value = next(iter(sources)), np.concatenate([parts[part] for part in sources])
        # Some processors store what they make themselves, gate and up experts in two calls.
        done = self._processor.process(
            weights=value,
            name=name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": self._open},
        )
        if done.name is None:
            self._given.add(name.removesuffix(".weight"))
            complete = [t for t in self._open if self._needed.get(t, set()) <= self._given]
            return {target: self._open.pop(target) for target in complete}
        target = self.target(done.name)
        made = done.weights
        if min(made.strides, default=0) < 0:  # torch has no such tensors
            made = np.ascontiguousarray(made)
        return {} if target is None else {target: torch.from_numpy(made)}

    def restored(self, name: str, value: Tensor) -> Tensor | None:
        restored = getattr(self._processor, "restored", None)
        found = None if restored is None else restored(value.numpy(), name)
        return None if found is None else torch.from_numpy(found)

    def _forget(self) -> None:
        super()._forget()
        self._given.clear()


class _ConversionMap(TensorMap):
    """The architectures of integrations/gguf: renamings, then at most one converter."""

    def __init__(self, architecture: str, model: Any, mapping: list[Any]) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        super().__init__()
        self._architecture, self._layers = architecture, model.config.num_hidden_layers
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]

    def names(self) -> dict[str, str]:
        from gguf import MODEL_TENSORS, TENSOR_NAMES

        found: dict[str, str] = {}
        for owner in (TENSOR_NAMES[t] for t in MODEL_TENSORS[arch_of(self._architecture)]):
            for layer in range(self._layers if "{bid}" in owner else 1):
                for kind in (".weight", ".bias", ""):
                    name = owner.format(bid=layer) + kind
                    found[self._rename(name)[0]] = name
        return found

    def target(self, name: str) -> str | None:
        return self._rename(name)[0]

    def _rename(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters)
        return target, pattern

    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
        target, pattern = self._rename(name)
        tensor = torch.from_numpy(value)
        if pattern is None:
            return {target: tensor}
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        values: Any = self._open.setdefault(target, {})
        values[pattern] = [tensor]
        if len(values) < len(converter.source_patterns):
            return {}
        del self._open[target]
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
            )
        (result,) = values.values()
        return {target: result}


class _Shallow:
    """A model seen to the depth at which its parameters have names that GGUF knows.

    get_gguf_hf_weights_map visits every submodule and builds a table of all names for each of
    the submodules, 5 s for 30 layers; only the model and its direct children can match.
    """

    def __init__(self, model: Any, depth: int = 1) -> None:
        self.config = model.config
        self._model, self._depth = model, depth

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._model.state_dict()
        return state

    def named_children(self) -> list[tuple[str, _Shallow]]:
        if self._depth == 0:
            return []
        return [
            (name, _Shallow(child, self._depth - 1))
            for name, child in self._model.named_children()
            if hasattr(child, "config")
        ]

"""What transformers knows about GGUF files: config, tokenizer, tensor names and layouts.

Everything here calls transformers' own tables and converters; the work is to call them on a file's
header, so that no tensor has to be read to learn where it goes. Of architectures that transformers
has no tables for, architectures.py has the configs, and the gguf package the names.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .architectures import config_values, divisors
from .file import GgufFile
from .layout import TensorMap
from .rows import ARCHITECTURES, STORED_AS, Architecture, all_rows, row_of
from .vocabulary import PRE

ROPE_DIVISORS = "rope_freqs.weight"  # of Llama 3, one for each frequency
_TOKENS = "tokenizer.ggml.tokens"
# What a tokenizer is made of besides scalars; at most this many elements for each token. Llama 3
# has 2.2 merges for each; T5's character map is one array of bytes.
_TOKENIZER_ARRAYS = {
    _TOKENS: 1,
    "tokenizer.ggml.scores": 1,
    "tokenizer.ggml.token_type": 1,
    "tokenizer.ggml.merges": 8,
    "tokenizer.ggml.precompiled_charsmap": 64,
}
_LONGEST_TOKEN = 1 << 13  # bytes, merges have two; transformers' time goes with the square
_LONGEST_ARRAY = 1 << 12  # of other arrays, which have an element for each layer


def supported_architectures() -> list[str]:
    """The values of general.architecture that can be loaded, sorted."""
    from gguf import MODEL_ARCH_NAMES

    known = MODEL_ARCH_NAMES.values()
    return sorted(a for a in known if a in ARCHITECTURES or _is_transformers(a))


def model_config(file: GgufFile) -> tuple[Any, dict[str, Any]]:
    """The transformers config of the file, and the dict it was made from.

    ValueError that lists the supported architectures if the file's is not one of them.
    """
    from transformers import CONFIG_MAPPING
    from transformers.integrations.gguf.gguf_config_mapping import (
        GGUF_CONFIG_ARCHS,
        get_gguf_config,
    )
    from transformers.integrations.gguf.reader import read_gguf_metadata
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if file.architecture not in supported_architectures():
        raise ValueError(
            f"{file.path}: no model is known for the GGUF architecture {file.architecture!r}; "
            f"supported: {', '.join(supported_architectures())}"
        )
    row = row_of(file.architecture, file.metadata)
    if row is not None and row.reads:
        values = config_values(file)
    else:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as header:
            file.write_header(header.file, _config_keys(file), file.tensors, empty=[_TOKENS])
            header.flush()
            if file.architecture in GGUF_CONFIG_ARCHS:
                values = get_gguf_config(*read_gguf_metadata(header.name))
            else:
                values = load_gguf_checkpoint(header.name)["config"]  # type: ignore[no-untyped-call]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    _add_rope_scaling(file, values)
    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values)), values


def _config_keys(file: GgufFile) -> list[str]:
    """The keys of the metadata that a config can depend on.

    transformers' reader takes 50 us for each element of an array (2.5 s for 49 k tokens).
    """
    prefixes = ("general.", f"{file.architecture}.", "tokenizer.ggml.")
    short = [k for k, a in file.arrays.items() if a.count <= _LONGEST_ARRAY]
    keys = [k for k in (*file.metadata, *short) if k.startswith(prefixes) and k != _TOKENS]
    return [*keys, _TOKENS] if _TOKENS in file.arrays else keys


def tokenizer(file: GgufFile, config: Any) -> Any:
    """The tokenizer AutoTokenizer would build from the file. ValueError if the file has none."""
    from transformers import TOKENIZER_MAPPING, PreTrainedTokenizerFast

    if _TOKENS not in file.arrays:
        raise ValueError(f"{file.path} has no tokenizer")
    kind = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast  # Mistral's own tokenizer package reads no GGUF
    # In a folder of its own: transformers would prefer tokenizer files that lie beside the GGUF.
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "model.gguf"), "wb") as header:
            file.write_header(header, _tokenizer_keys(file), [])
        made = kind.from_pretrained(folder, gguf_file="model.gguf")
    made.init_kwargs[PRE] = file.metadata.get("tokenizer.ggml.pre")
    made.name_or_path = made.init_kwargs["name_or_path"] = file.path
    return made


def _tokenizer_keys(file: GgufFile) -> list[str]:
    """The keys of the metadata that the tokenizer is made of. ValueError: too long for the model.

    So a small file cannot make transformers work for minutes.
    """
    embedding = file.tensors.get("token_embd.weight")
    vocabulary = file.arrays[_TOKENS].count if embedding is None else embedding.shape[0]
    found = {key: array for key, array in file.arrays.items() if key in _TOKENIZER_ARRAYS}
    for key, array in found.items():
        if array.count > _TOKENIZER_ARRAYS[key] * vocabulary:
            raise ValueError(
                f"{file.path}: {key} has {array.count} elements, but token_embd.weight has "
                f"{vocabulary} rows"
            )
        if array.longest > _LONGEST_TOKEN:
            raise ValueError(
                f"{file.path}: {key} has an element of {array.longest} bytes; at most "
                f"{_LONGEST_TOKEN} are read"
            )
    scalars = [key for key in file.metadata if key.startswith("tokenizer.")]
    return ["general.architecture", *scalars, *found]


def tensor_map(file: GgufFile, model: Any, values: dict[str, Any]) -> TensorMap:
    """The map for the file's architecture; transformers has an old and a new kind."""
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

    architecture = file.architecture
    if architecture in GGUF_ARCHS:
        return _ConversionMap(GGUF_ARCHS[architecture](model.config))
    return ProcessorMap(architecture, model, values, row_of(architecture, file.metadata))


def gguf_names(model: Any, layers: Iterable[str]) -> dict[str, str]:
    """{layer of the transformers model: its weight's name in GGUF files}, of those that have one.

    ValueError: gguf knows no architecture of the model's type.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    given = model.config.get_text_config().model_type
    kind = given.removesuffix("_text")
    spellings = [name for name, row in all_rows() if row.model_type == given]
    spellings += [kind, kind.replace("_", "-"), kind.replace("_", ""), STORED_AS.get(kind, kind)]
    arches = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    found = next((name for name in spellings if name in arches), None)
    if found is None:
        raise ValueError(f"gguf has no architecture for models of the type {kind!r}")
    known = get_tensor_name_map(arches[found], model.config.get_text_config().num_hidden_layers)
    named = {layer: known.get_name(layer) for layer in layers}
    return {layer: f"{name}.weight" for layer, name in named.items() if name is not None}


def layer_of(name: str) -> int | None:
    """The number of the layer that a name of the model is in."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


class ProcessorMap(TensorMap):
    """The architectures of modeling_gguf_pytorch_utils: a name table and a TensorProcessor."""

    def __init__(
        self, architecture: str, model: Any, values: dict[str, Any], row: Architecture | None
    ) -> None:
        from transformers import modeling_gguf_pytorch_utils as theirs

        from . import processors

        super().__init__()
        known = row is None or not row.reads
        kind = theirs.TENSOR_PROCESSORS.get(architecture, theirs.TensorProcessor)
        if row is not None and not known:
            kind = getattr(processors, row.processor, None) or getattr(theirs, row.processor)
        self._processor: Any = kind(config=values)  # type: ignore[no-untyped-call]
        own = STORED_AS.get(model.config.model_type) if known else architecture
        self._names = theirs.get_gguf_hf_weights_map(
            _Shallow(model), self._processor, model_type=own
        )
        for leaf, end in row.leaves if row is not None else ():
            for target in (t for t in model.state_dict() if t.endswith(end)):
                self._names[f"blk.{layer_of(target)}.{leaf}"] = target
        self._needed: dict[str, set[str]] = {}  # by target, names without ".weight"
        for name, target in self._names.items():
            self._needed.setdefault(target, set()).add(name.removesuffix(".weight"))
        self._given: set[str] = set()

    def names(self) -> dict[str, str]:
        """{name in the file: name in the model}."""
        return {name: target for name, target in self._names.items() if isinstance(target, str)}

    def target(self, name: str) -> str | None:
        # Stacked experts are listed without ".weight".
        found = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
        return found if isinstance(found, str) else None

    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
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

    def _forget(self) -> None:
        super()._forget()
        self._given.clear()


class _ConversionMap(TensorMap):
    """The architectures of integrations/gguf: renamings, then at most one converter."""

    def __init__(self, mapping: list[Any]) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        super().__init__()
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]

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


def _is_transformers(architecture: str) -> bool:
    """Whether transformers makes configs of this architecture's files."""
    from transformers import CONFIG_MAPPING
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    if architecture in GGUF_CONFIG_ARCHS:
        return True
    spellings = {architecture, architecture.replace("-", "_"), architecture.replace("moe", "_moe")}
    spellings.add(architecture.removesuffix("encoder"))  # t5encoder
    return any(s in GGUF_CONFIG_MAPPING and s in CONFIG_MAPPING for s in spellings)


def _add_rope_scaling(file: GgufFile, values: dict[str, Any]) -> None:
    """State Llama 3's rope scaling in the config; the file has it as one divisor per frequency.

    transformers' loader ignores these divisors, so that long contexts go wrong.
    """
    theta = values.get("rope_theta", values.get("rope_parameters", {}).get("rope_theta"))
    if ROPE_DIVISORS not in file.tensors or theta is None:
        return
    given = file.dense(ROPE_DIVISORS).flatten().double()
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(given.max())}
    rope |= {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    for high in (4.0, 1.0):  # of Llama 3.1 to 3.3, and 4; only the overall factor differs
        expected = divisors(given.numel(), rope | {"high_freq_factor": high})
        if rope["factor"] > 1 and torch.allclose(given, expected, rtol=1e-4):
            values["rope_parameters"] = rope | {"high_freq_factor": high}

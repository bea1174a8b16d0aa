"""What transformers knows about GGUF files: config, tokenizer, tensor names and layouts.

Everything here calls transformers' own tables and converters; the work is to call them on a file's
header and on small probe tensors, so that no tensor has to be decoded to learn where it goes.
"""

from __future__ import annotations

import os
import re
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .gguf_file import GgufFile

_PROBE_SIZE = 4


def supported_architectures() -> list[str]:
    """The values of general.architecture that transformers maps, sorted."""
    from gguf import MODEL_ARCH_NAMES

    return sorted(a for a in MODEL_ARCH_NAMES.values() if _is_supported(a))


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

    if not _is_supported(file.architecture):
        raise ValueError(
            f"{file.path}: transformers cannot map the GGUF architecture {file.architecture!r}; "
            f"supported: {', '.join(supported_architectures())}"
        )
    if file.architecture in GGUF_CONFIG_ARCHS:
        metadata, names = read_gguf_metadata(file.path)
        values = get_gguf_config(metadata, names)
    else:
        # Its reader takes seconds for a vocabulary (2.5 s of 49 k tokens), which it does not need.
        with tempfile.NamedTemporaryFile(suffix=".gguf") as header:
            file.write_header_without_vocabulary(header.file)
            header.flush()
            values = load_gguf_checkpoint(header.name)["config"]  # type: ignore[no-untyped-call]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    _add_rope_scaling(file, values)
    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values)), values


def tokenizer(file: GgufFile, config: Any) -> Any:
    """The tokenizer AutoTokenizer would build from the file. ValueError if the file has none."""
    from transformers import TOKENIZER_MAPPING, PreTrainedTokenizerFast

    if "tokenizer.ggml.tokens" not in file.array_lengths:
        raise ValueError(f"{file.path} has no tokenizer")
    kind = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast  # Mistral's own tokenizer package reads no GGUF
    # A folder of its own, or tokenizer files beside the GGUF would be taken instead.
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(os.path.abspath(file.path), os.path.join(folder, "model.gguf"))
        made = kind.from_pretrained(folder, gguf_file="model.gguf")
    made.name_or_path = made.init_kwargs["name_or_path"] = file.path
    return made


@dataclass
class Layout:
    """The model's matrix is the file's, transposed or with its rows or its columns in this order.

    rows[i] is the file's row that is the model's row i; columns likewise.
    """

    transposed: bool = False
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


class TensorMap(ABC):
    """Where a GGUF tensor goes in the model, and what transformers does to it on the way."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, tuple[int, int]], Layout | None] = {}
        self._open: dict[str, Any] = {}  # model tensors that wait for another of the file

    @abstractmethod
    def target(self, name: str) -> str | None:
        """The model's name for the tensor; None if the model has no place for it."""

    @abstractmethod
    def convert(self, name: str, value: np.ndarray) -> dict[str, Tensor]:
        """The model tensors that are complete once this one is given: {model name: tensor}."""

    def layout(self, name: str, shape: tuple[int, int]) -> Layout | None:
        """How the model has a 2-D tensor [N, K] of the file, found by converting a probe.

        None if it is more than an order of rows or of columns, or has other values.
        """
        key = (re.sub(r"\.\d+\.", ".#.", name), shape)
        if key not in self._layouts:
            n, k = shape
            for probe in ((n, _PROBE_SIZE), (_PROBE_SIZE, k), shape):
                try:
                    self._layouts[key] = self._probe(name, *probe)
                    break
                except (ValueError, IndexError, RuntimeError):  # it counts what was left out
                    continue
            else:
                self._layouts[key] = None
        return self._layouts[key]

    def _probe(self, name: str, n: int, k: int) -> Layout | None:
        probe = np.arange(n * k).reshape(n, k)
        with np.errstate(all="ignore"):
            made = self.convert(name, probe)
        self._open.clear()
        if len(made) != 1:
            return None
        out = next(iter(made.values())).numpy()
        if np.array_equal(out, probe):
            return Layout()
        if np.array_equal(out, probe.T):
            return Layout(transposed=True)
        if out.shape != probe.shape:
            return None
        rows, columns = out[:, 0] // k, out[0] % k
        if _is_order(rows, n) and np.array_equal(out, probe[rows]):
            return Layout(rows=rows)
        if _is_order(columns, k) and np.array_equal(out, probe[:, columns]):
            return Layout(columns=columns)
        return None


def _is_order(index: np.ndarray, n: int) -> bool:
    return np.array_equal(np.sort(index), np.arange(n))


def tensor_map(file: GgufFile, model: Any, config_values: dict[str, Any]) -> TensorMap:
    """The map for the file's architecture; transformers has an old and a new kind."""
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

    if file.architecture in GGUF_ARCHS:
        return _ConversionMap(GGUF_ARCHS[file.architecture](model.config))
    return _ProcessorMap(file, model, config_values)


class _ProcessorMap(TensorMap):
    """The architectures of modeling_gguf_pytorch_utils: a name table and a TensorProcessor."""

    def __init__(self, file: GgufFile, model: Any, config_values: dict[str, Any]) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        super().__init__()
        kind = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
        self._processor: Any = kind(config=config_values)  # type: ignore[no-untyped-call]
        self._names = get_gguf_hf_weights_map(_Shallow(model), self._processor)
        self._missing: dict[str, set[str]] = {}
        for name in file.tensors:
            if target := self.target(name):
                self._missing.setdefault(target, set()).add(name)

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
            for names in self._missing.values():
                names.discard(name)
            complete = [t for t in self._open if not self._missing.get(t)]
            return {target: self._open.pop(target) for target in complete}
        target = self._names.get(done.name)
        made = torch.from_numpy(np.ascontiguousarray(done.weights))
        return {} if target is None else {target: made}


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
    them, 5 s for 30 layers; only the model and its direct children can match.
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


def _is_supported(architecture: str) -> bool:
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
    if "rope_freqs.weight" not in file.tensors or "rope_theta" not in values:
        return
    divisors = file.dense("rope_freqs.weight").flatten().double()
    # Llama 3.1 to 3.3: 8192 positions, factors 1 and 4; only the overall factor differs.
    context, low, high, factor = 8192, 1.0, 4.0, float(divisors.max())
    steps = torch.arange(divisors.numel(), dtype=torch.float64) / divisors.numel()
    turns = context / (2 * torch.pi * float(values["rope_theta"]) ** steps)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factor > 1 and torch.allclose(divisors, expected, rtol=1e-4):
        values["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": values["rope_theta"],
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }

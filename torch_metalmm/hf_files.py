"""What the safetensors files of a checkpoint hold, by the names of the model they load into."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Found:
    """A tensor of a file: its safetensors dtype ("U8", "BF16") and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    converted: bool  # transformers makes the model's tensor out of it and perhaps others


def read_headers(files: Sequence[str]) -> dict[str, Found]:
    """{name in the file: tensor}; reads no tensor data.

    ValueError: a file is not a whole safetensors file, or two have a tensor of one name.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Found] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # it is no dict
                    tensor = opened.get_slice(key)
                    shape = tuple(tensor.get_shape())
                    if key in found:
                        raise ValueError(f"{key} is in {found[key].file} and in {file}")
                    found[key] = Found(str(file), tensor.get_dtype(), shape, False)
        except SafetensorError as error:
            raise ValueError(f"cannot read {file}: {error}") from None
    return found


def count_tensors(files: Sequence[str]) -> int:
    """How many tensors the files have. ValueError: one is not a whole safetensors file."""
    from safetensors import SafetensorError, safe_open

    count = 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                count += len(opened.keys())
        except SafetensorError as error:
            raise ValueError(f"cannot read {file}: {error}") from None
    return count


def find_tensors(files: Sequence[str], model: Any, conversions: list[Any]) -> dict[str, Found]:
    """{name in the model: the tensor that from_pretrained will load there}.

    conversions: transformers' renamings and converters for the model; they are applied as its
    loader does, so that old names, added and removed prefixes are found. ValueError as
    read_headers.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = copy.deepcopy(conversions)  # they remember what they matched
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state: dict[str, nn.Parameter] = model.state_dict(keep_vars=True)
    result = {}
    for key, tensor in sorted(
        read_headers(files).items(), key=lambda item: dot_natural_key(item[0])
    ):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is None:
            result[name] = tensor
            continue
        converter = next(c for c in converters if pattern in c.source_patterns)
        first = converter.target_patterns[0]
        for target in converter.target_patterns:
            made = Found(tensor.file, tensor.dtype, tensor.shape, True)
            result[name.replace(first, target)] = made
    return result

"""What the safetensors files of a checkpoint hold, by the names of the model they load into."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..files.headers import Found, read_headers


def find_tensors(files: Sequence[str], model: Any, conversions: list[Any]) -> dict[str, Found]:
    """{name in the model: the tensor that from_pretrained will load there}.

    conversions: transformers' renamings and converters for the model, applied as its loader does,
    so that old names, added and removed prefixes are found. ValueError as read_headers.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = copy.deepcopy(conversions)  # conversions remember what they matched
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

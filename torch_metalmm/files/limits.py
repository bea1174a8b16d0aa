"""Limits of a config, checked before anything is built; each layer takes milliseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .headers import count_tensors

# Models of 2026 have up to 160 layers, 512 experts in each, and 21,843 labels.
MAX_LAYERS, _MAX_LABELS = 1 << 10, 1 << 20
_LAYERS = re.compile(r"(^|_)(layers?|blocks|depth)$")
_EXPERTS = re.compile(r"(^|_)experts$")
_NO_LAYERS_OF_THIS_MODEL = 128  # a default of its class (max_window_layers) may be stated


def check_counts(path: Path, values: Mapping[str, Any]) -> None:
    """ValueError: a count in config.json is beyond what the folder holds, or beyond any model."""
    layers = min(MAX_LAYERS, max(_count_tensors(path), _NO_LAYERS_OF_THIS_MODEL))
    left: list[Any] = [values]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        if not isinstance(part, dict):
            continue
        left += part.values()
        for key, value in part.items():
            most = _most(key, layers)
            if most is not None and isinstance(value, int) and value > most:
                bits = value.bit_length()
                shown = value if bits < 64 else f"a number of {bits} bits"
                raise ValueError(
                    f"{path / 'config.json'}: {key} = {shown}, at most {most} are built for the "
                    "tensors of the folder"
                )


def _most(key: str, layers: int) -> int | None:
    if key == "num_labels":
        return _MAX_LABELS
    return layers if _LAYERS.search(key) else MAX_LAYERS if _EXPERTS.search(key) else None


def _count_tensors(path: Path) -> int:
    """The number of tensors in the folder; MAX_LAYERS if it has weights of another kind."""
    files = [str(file) for file in path.glob("*.safetensors") if file.is_file()]
    return count_tensors(files) if files else MAX_LAYERS

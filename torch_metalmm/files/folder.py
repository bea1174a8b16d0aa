"""The config of a model folder, who packed the folder's weights, and its tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .blame import blaming
from .owned import CONFIG, packed_weights

QUANT_METHOD = "metalmm"  # the packing's name in config.json, among transformers' methods


def is_packed(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a packed model."""
    try:
        check_packed(Path(folder))
    except (OSError, ValueError):
        return False
    return True


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder. FileNotFoundError; ValueError: it is no JSON object."""
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    if not (path / CONFIG).exists():
        raise FileNotFoundError(f"{path} has no {CONFIG}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path / CONFIG} must be a JSON object, got {type(config).__name__}")
    return config


def check_packed(path: Path) -> None:
    """ValueError or OSError that says why the folder is no packed model."""
    values = read_config(path)
    method = _quant_method(values)
    if method != QUANT_METHOD:
        is_mlx = method is None and ("quantization" in values or "quantization_config" in values)
        other = "; load_quantized reads those of other libraries" if method is not None else ""
        mlx = "; load_mlx reads MLX checkpoints" if is_mlx else other
        raise ValueError(
            f"{path} is not a packed model: its quantization_config has the quant_method "
            f"{method!r}, not {QUANT_METHOD!r}{mlx}"
        )


def check_dense(path: Path) -> None:
    """ValueError if another method quantized the model in the folder. OSError: no config.json."""
    method = _quant_method(read_config(path))
    if method not in (None, QUANT_METHOD):
        raise ValueError(f"{path} is quantized by {method!r}; only dense models are packed")


def _quant_method(values: dict[str, Any]) -> Any:
    quant = values.get("quantization_config")
    return quant.get("quant_method") if isinstance(quant, dict) else None


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a model folder, None if it has none. No code of the folder is run."""
    from transformers import AutoTokenizer

    if not (path / "tokenizer_config.json").exists():
        return None
    with blaming(path, "transformers makes no tokenizer of its files"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def replaceable_weights(path: Path) -> set[str] | None:
    """The weights in the folder that save_packed may replace; None if its model is not packed."""
    if not is_packed(path):
        return None
    modules = read_config(path)["quantization_config"].get("modules")
    table = modules if isinstance(modules, dict) else {}
    return packed_weights(path, [name for name, format in table.items() if format])

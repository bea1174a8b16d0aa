"""Packed models on disk: a folder with safetensors, config.json and the tokenizer's files.

The format is that of the transformers quantization method "metalmm" (see hf.py). What is added to
save_pretrained and from_pretrained: a save is complete or leaves the old files, and a load refuses
a folder that lacks a tensor instead of drawing it at random.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from .blame import blaming
from .extras import HF, require
from .owned import CONFIG, obsolete_tokenizer, obsolete_weights, packed_weights
from .staging import staged


def save_packed(model: Any, tokenizer: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a transformers model with packed layers, and its tokenizer unless that is None.

    All files change at once (see staging.py): a save that fails or is killed leaves the model that
    was there. Weights and tokenizer files of an earlier save are removed, other files stay. options
    go to the model's save_pretrained (max_shard_size).
    ValueError: the model has no packed layer or is not transformers'. OSError: the folder cannot be
    written, or holds weights that are not a packed model's (checked before anything is written).
    """
    require("save_packed", *HF)
    from .hf_config import stored_config
    from .hf_save import check_save

    if stored_config(model) is None:
        raise ValueError("model has no packed layer; call quantize_ first")
    target, weights = check_save(model, folder)

    def obsolete(names: set[str]) -> set[str]:
        old = obsolete_weights(weights, options.get("variant"))
        return old if tokenizer is None else old | obsolete_tokenizer(target)

    with staged(target, obsolete) as staging:
        model.save_pretrained(staging, **options)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def replaceable_weights(path: Path) -> set[str] | None:
    """The weights in the folder that save_packed may replace; None if its model is not packed."""
    if not is_packed(path):
        return None
    modules = read_config(path)["quantization_config"].get("modules")
    table = modules if isinstance(modules, dict) else {}
    return packed_weights(path, [name for name, format in table.items() if format])


def load_packed(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a packed folder; no tokenizer in it gives None.

    dtype is that of activations and unpacked weights, by default the one the model was saved with.
    The model is frozen and in eval mode. On the CPU its weights are views of the mapped files, not
    to be truncated meanwhile: a read beyond their end kills the process (SIGBUS). Saves of ours
    write new files.
    No code is fetched or run, and no file outside the folder is read.
    OSError: the folder or a file is missing. ValueError: not such a folder, its tensors do not fit
    its config, or it names code or files elsewhere.
    """
    require("load_packed", *HF)
    from .skeleton import named_class
    from .untrusted import load_config

    path = Path(folder)
    check_packed(path)
    config = load_config(path)
    kind = named_class(config)
    if kind is None:
        raise ValueError(f"{path}: transformers has no class {config.architectures} of its config")
    with blaming(path, "its files make no such model"):
        model, info = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            device_map=None if str(device) == "cpu" else {"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    for problem, keys in (
        ("has no tensor for", info["missing_keys"]),
        ("has tensors the model does not:", info["unexpected_keys"]),
    ):
        if keys:
            raise ValueError(f"{path} {problem} {', '.join(sorted(keys)[:6])}")
    return model.requires_grad_(False), read_tokenizer(path)


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
    from .hf_config import QUANT_METHOD

    values = read_config(path)
    method = _quant_method(values)
    if method != QUANT_METHOD:
        is_mlx = method is None and ("quantization" in values or "quantization_config" in values)
        mlx = "; load_mlx reads MLX checkpoints" if is_mlx else ""
        raise ValueError(
            f"{path} is not a packed model: its quantization_config has the quant_method "
            f"{method!r}, not {QUANT_METHOD!r}{mlx}"
        )


def check_dense(path: Path) -> None:
    """ValueError if another method quantized the model in the folder. OSError: no config.json."""
    from .hf_config import QUANT_METHOD

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

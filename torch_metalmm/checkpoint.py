"""Packed models on disk: a folder with safetensors, config.json and the tokenizer's files."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .linear import QuantEmbedding, QuantLinear
from .skeleton import empty_model, put_dense, put_packed, set_input_order, untie

QUANT_METHOD = "metalmm"
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"


def save_packed(model: Any, tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write a transformers model with packed layers so that load_packed gives it back.

    config.json lists the format of every packed layer under quantization_config, and which names
    share one tensor; shared tensors are written once. The files are written under a temporary name
    and moved into place when all of them are complete, config.json last.
    ValueError: the model has no packed layer or no config. OSError: the folder cannot be written
    or holds a model that is not a packed one (checked before anything is written).
    """
    modules = {
        name: module.format
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantLinear | QuantEmbedding)
    }
    if not modules:
        raise ValueError("model has no packed layer; call quantize_ first")
    if not hasattr(model, "config"):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    target = prepare_folder(folder)
    tensors, shared = _distinct_tensors(model)
    config = copy.deepcopy(model.config)
    config.quantization_config = {
        "quant_method": QUANT_METHOD,
        "modules": modules,
        "shared": shared,
    }
    config.architectures = [type(model).__name__]
    config.dtype = _activation_dtype(model)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    try:
        _save_tensors(tensors, staging / _WEIGHTS)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        config.save_pretrained(staging)
        for file in sorted(staging.iterdir(), key=lambda f: f.name == _CONFIG):
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_packed(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder that save_packed wrote; no tokenizer saved gives None.

    dtype is that of activations and unpacked weights, by default the one the model was saved with.
    The model is frozen and in eval mode.
    OSError: the folder or a file is missing. ValueError: not such a folder, or its tensors do not
    fit its config.
    """
    from transformers import AutoConfig

    path = Path(folder)
    quant = _quantization(path)
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = empty_model(config, dtype or config.dtype or torch.float32)
    tensors = _read_tensors(path / _WEIGHTS)
    shared: dict[str, str] = quant["shared"]
    _check_names(path, model, tensors, shared)
    untie(model, set(tensors))
    # ".weight" comes after ".bias" and ".input_order": reversed, layers exist before their parts.
    for name in sorted(tensors, reverse=True):
        names = [name, *(other for other, first in shared.items() if first == name)]
        owner, _, leaf = name.rpartition(".")
        tensor = tensors[name].to(device)
        if leaf == "weight" and owner in quant["modules"]:
            put_packed(model, names, tensor, quant["modules"][owner])
        elif leaf == "input_order":
            set_input_order(model, names, tensor)
        else:
            put_dense(model, names, tensor, device)
    model.to(device)  # buffers, which were made on the CPU
    if (path / "generation_config.json").exists():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.requires_grad_(False), _read_tokenizer(path)


def is_packed(folder: str | os.PathLike[str]) -> bool:
    """Whether save_packed wrote this folder."""
    try:
        _quantization(Path(folder))
    except (OSError, ValueError):
        return False
    return True


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made if needed and known to be writable.

    OSError that says why not; FileExistsError if it holds a model that save_packed did not write.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise type(error)(f"cannot write to the folder {path}: {error.strerror}") from None
    if (path / _CONFIG).exists() and not is_packed(path):
        raise FileExistsError(f"{path} holds another model; choose an empty folder")
    return path


def _quantization(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    if not (path / _CONFIG).exists():
        raise FileNotFoundError(f"{path} has no {_CONFIG}")
    try:
        config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path / _CONFIG} is not JSON: {error}") from None
    quant = config.get("quantization_config") or {}
    if quant.get("quant_method") != QUANT_METHOD:
        raise ValueError(
            f"{path} is not a packed model: its quantization_config has the quant_method "
            f"{quant.get('quant_method')!r}, not {QUANT_METHOD!r}"
        )
    result: dict[str, Any] = quant
    return result


def _activation_dtype(model: Any) -> torch.dtype:
    """What the model computes in now; its config may tell of an earlier time."""
    for module in model.modules():
        if isinstance(module, QuantEmbedding):
            return module.dtype
    dtype: torch.dtype = model.dtype
    return dtype


def _distinct_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors, each once, and {name: the name it is stored under} for the others."""
    first_name: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = first_name.setdefault(id(tensor), name)
        if first == name:
            tensors[name] = tensor.detach().contiguous()
        else:
            shared[name] = first
    return tensors, shared


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not file.exists():
        raise FileNotFoundError(f"no such file: {file}")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    return tensors


def _check_names(
    path: Path, model: nn.Module, tensors: dict[str, Tensor], shared: dict[str, str]
) -> None:
    wanted = set(model.state_dict())
    given = {n for n in (*tensors, *shared) if not n.endswith(".input_order")}
    if missing := sorted(wanted - given):
        raise ValueError(f"{path} has no tensor for {', '.join(missing[:6])}")
    if extra := sorted(given - wanted):
        raise ValueError(f"{path} has tensors the model does not: {', '.join(extra[:6])}")


def _read_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not (path / "tokenizer_config.json").exists():
        return None
    return AutoTokenizer.from_pretrained(path)

"""Loading what GPTQ, AWQ, compressed-tensors, HQQ and torchao quantized; weights stay packed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import HF, require, uncollected
from ..models.integers.affine import Rows
from ..models.replace import weight_shape
from ..models.skeleton import empty_model
from .blame import blaming
from .fill import fill, finish
from .folder import QUANT_METHOD, read_config, read_tokenizer
from .methods import METHODS, Method, Stacks, method_of
from .source import Source
from .untrusted import check_index, config_of


@uncollected()
def load_quantized(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder that another library quantized; no tokenizer gives None.

    The quantization_config of config.json names the method: gptq (2, 3, 4, 8 bits, version 1 and
    2, act-order), awq (gemm), compressed-tensors (pack-quantized), hqq (axis 1), torchao
    (Int4Tensor, IntxUnpackedToInt8Tensor, Int8Tensor) or mxfp4 (GPT-OSS). None of these libraries
    is needed. Quantized layers become QuantLinear in an affine format with the same values: with
    scales in f16 or bf16 w is what the method's formula gives in f32 arithmetic, which the
    libraries round to f16 or bf16. 32 divides a group. Experts in mxfp4 become QuantExperts of it.
    dtype is that of activations and unpacked weights, by default that of the checkpoint's unpacked
    tensors. The model is frozen and in eval mode.

    OSError: a file is missing. ValueError: another method, a layout, axis or group size without a
    format here, tensors that contradict the config or the model, a layer both quantized and dense,
    files of weights that no index names, experts that transformers stacks, an architecture that
    transformers has not. Nothing in the folder is executed.
    """
    require("load_quantized", *HF)
    path = Path(folder)
    values = read_config(path)
    with blaming(path, "its quantization"):
        method = method_of(_quantization(values))
    files = _files(path)
    config = config_of(path, {k: v for k, v in values.items() if k != "quantization_config"})
    with blaming(path, "no model fits its config"):
        source = Source(path, files, config)
        found = source.dense_dtype(tuple(f".{leaf}" for leaf in method.leaves))
        model = empty_model(config, dtype or found or config.dtype or torch.float32)
    with source:
        _fill(model, source, method, device)
    return finish(path, model), read_tokenizer(path)


def _fill(model: Any, source: Source, method: Method | Stacks, device: torch.device | str) -> None:
    if isinstance(method, Stacks):
        experts = method.put(model, source, device)
        fill(model, source, {}, None, device, experts)
        return
    packed = _packed(source, model, method)
    if not packed:
        raise ValueError(f"{source.path} has no tensor <layer>.{method.leaves[0]}")

    def rows(owner: str, module: nn.Module) -> Rows:
        with blaming(source.path, owner):
            return _rows(source, packed[owner], owner, module, method)

    fill(model, source, packed, rows, device)


def is_quantized(path: Path) -> bool:
    """Whether config.json names a method of load_quantized, whether or not it can be loaded."""
    try:
        return str(_quantization(read_config(path))["quant_method"]) in METHODS
    except (OSError, ValueError):
        return False


def _quantization(values: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config. ValueError: there is none, or another loader reads it."""
    given = values.get("quantization_config")
    if not isinstance(given, dict):
        raise ValueError(f"config.json must have a quantization_config, got {given!r}")
    method = given.get("quant_method")
    if method is None or method == QUANT_METHOD:
        loader = "load_mlx" if method is None else "load_packed"
        raise ValueError(f"its quantization_config has quant_method {method!r}: use {loader}")
    return given


def _files(path: Path) -> list[str]:
    """The weights: model*.safetensors, or else *.safetensors (AutoGPTQ's names).

    ValueError: they are several, and no index names one of them; it may hold other weights.
    """
    named = check_index(path)
    for pattern in ("model*.safetensors", "*.safetensors"):
        files = sorted(file for file in path.glob(pattern) if file.is_file())
        if len(files) > 1 and (unknown := [f.name for f in files if f.name not in named]):
            raise ValueError(f"{path} has {len(files)} {pattern}; no index names {unknown[0]}")
        if files:
            return [str(file) for file in files]
    raise FileNotFoundError(f"{path} has no *.safetensors; weights are read from no other files")


def _packed(source: Source, model: Any, method: Method) -> dict[str, list[str]]:
    """{quantized layer: its tensors}, with a bias that the model's layer does not have."""
    mark = f".{method.leaves[0]}"
    packed = {}
    for owner in (name.removesuffix(mark) for name in source.keys if name.endswith(mark)):
        names = [f"{owner}.{leaf}" for leaf in method.leaves]
        if f"{owner}.bias" not in model.state_dict():
            names.append(f"{owner}.bias")
        packed[owner] = [name for name in names if name in source.keys]
    return packed


def _rows(source: Source, names: list[str], owner: str, module: nn.Module, method: Method) -> Rows:
    tensors: dict[str, Tensor] = {n.removeprefix(f"{owner}."): source.read(n) for n in names}
    if bool(tensors.pop("bias", torch.zeros(1)).any()):  # AutoGPTQ stores one of zeros
        raise ValueError("it has a bias, the model's layer has none")
    return method.pack(tensors, *weight_shape(module))

"""MLX checkpoints of small random models, written by mlx itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from torch_metalmm import save_mlx

mx.set_default_device(mx.cpu)

DTYPES = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}


def from_mlx(a: mx.array) -> Tensor:
    if a.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(a.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(a))


def read(folder: Path) -> dict[str, mx.array]:
    """All tensors of a checkpoint, as mlx reads them."""
    tensors: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(mx.load(str(file)))
    return tensors


def same_tensors(a: Mapping[str, mx.array], b: Mapping[str, mx.array]) -> bool:
    """Whether names, dtypes and bytes are equal."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and bool(mx.array_equal(a[n].view(mx.uint8), b[n].view(mx.uint8)))
        for n in a
    )


def quantized(
    tensors: Mapping[str, mx.array], layers: Mapping[str, Mapping[str, Any]], dtype: mx.Dtype
) -> dict[str, mx.array]:
    """The tensors as `dtype`, those layers quantized by mlx."""
    made = {name: t.astype(dtype) for name, t in tensors.items()}
    for layer, sizes in layers.items():
        parts = mx.quantize(made.pop(f"{layer}.weight"), **sizes)
        names = ("weight", "scales", "biases")[: len(parts)]
        made.update({f"{layer}.{n}": t for n, t in zip(names, parts, strict=True)})
    return made


def logits_of_mlx_lm(folder: Path, ids: Tensor) -> Tensor:
    """What mlx-lm computes of a checkpoint for these tokens."""
    from mlx_lm import utils

    model, _ = utils.load_model(folder)
    return from_mlx(model(mx.array(ids.numpy())))


def quantize_by_mlx_lm(
    folder: Path, target: Path, group: int | None = 64, bits: int | None = 4, predicate: Any = None
) -> dict[str, Any]:
    """mlx-lm's quantization of a dense checkpoint; returns the config.

    predicate(name, module): whether, or how, a layer is quantized; a function of the model makes it
    where group and bits are None.
    """
    from mlx_lm import utils

    model, config = utils.load_model(folder)
    model, config = utils.quantize_model(model, config, group, bits, quant_predicate=predicate)
    utils.save_model(target, model)
    utils.save_config(config, target / "config.json")
    return dict(config)


def write(
    folder: Path,
    model: Any,
    sizes: Mapping[str, Any],
    dtype: str = "f16",
    overrides: Mapping[str, Mapping[str, Any] | bool] | None = None,
) -> dict[str, mx.array]:
    """A checkpoint of the dense model, every matrix quantized to `sizes` or its override."""
    save_mlx(model, None, folder)
    config = json.loads((folder / "config.json").read_text())
    overrides = overrides or {}
    layers = {
        name.removesuffix(".weight"): sizes | (overrides.get(name.removesuffix(".weight")) or {})
        for name, t in read(folder).items()
        if t.ndim == 2 and overrides.get(name.removesuffix(".weight")) is not False
    }
    tensors = quantized(read(folder), layers, DTYPES[dtype])
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    config["quantization"] = dict(sizes) | {
        n: dict(o) if isinstance(o, Mapping) else o for n, o in overrides.items()
    }
    config["quantization_config"] = config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").unlink()
    return tensors

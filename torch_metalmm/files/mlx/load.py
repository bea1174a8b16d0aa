"""Loading MLX checkpoints as transformers models whose weights stay packed."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...extras import HF, require
from ...models.attach import attach
from ...models.replace import is_conv1d, packable, replaceable, summary, weight_shape
from ...models.skeleton import empty_model, put_dense, put_packed, tied_names
from ..blame import blaming
from ..folder import read_config, read_tokenizer
from ..headers import Found, read_headers
from ..limits import check_counts
from ..untrusted import forget_kernels
from .layout import PREFIXES, Quantization, pack

# mlx-lm's loader changes these models' numbers, so that they are not transformers'.
_OTHER_NUMBERS = {
    "qwen3_next": "1 is added to norm weights",
    "qwen3_5": "1 is added to norm weights",
    "qwen3_5_text": "1 is added to norm weights",
    "qwen3_5_moe": "1 is added to norm weights",
    "step3p5": "1 is added to norm weights",
    "falcon_h1": "projections are multiplied by the model's factors",
    "baichuan_m1": "the output head is normalized",
}


def load_mlx(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of an MLX checkpoint of mlx-lm; no tokenizer in the folder gives None.

    Quantized layers become QuantLinear and QuantEmbedding with the same values, bit for bit: affine
    with 2 to 8 bits, groups of 32, 64, 128 and scales of any float dtype, mxfp4, mxfp8 and nvfp4
    (the last two where K is a multiple of 64). dtype is that of activations and unpacked weights,
    by default that of the checkpoint's unpacked tensors. Every model*.safetensors of the folder is
    read; its index is not, since it is often that of the model before quantization. The model is
    frozen and in eval mode.

    OSError: a file is missing. ValueError: not such a checkpoint, a mode or size without a format
    here, tensors that contradict the config or the model, quantized experts in one tensor, an
    architecture of which MLX stores other numbers than transformers. Nothing in the folder is
    executed.
    """
    require("load_mlx", *HF)

    path = Path(folder)
    values = read_config(path)
    quantization = pop_quantization(path, values)
    files = sorted(str(f) for f in path.glob("model*.safetensors") if f.is_file())  # see staging.py
    if not files:
        raise FileNotFoundError(f"{path} has no model*.safetensors")
    config = _config(path, values)
    with blaming(path, "no model fits its config"):
        source = _Source(files, config)
        model = empty_model(config, dtype or source.dense_dtype() or config.dtype or torch.float32)
    with source:
        _fill(path, model, source, quantization, device)
    model.to(device)  # buffers, which were made on the CPU
    if (path / "generation_config.json").exists():
        from transformers import GenerationConfig

        with blaming(path, "transformers makes nothing of its generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(path)
    attach(model)
    return model.requires_grad_(False), read_tokenizer(path)


def is_mlx(path: Path) -> bool:
    """Whether config.json has MLX's entry of quantization, whether or not load_mlx takes it."""
    try:
        values = read_config(path)
    except (OSError, ValueError):
        return False
    given = values.get("quantization", values.get("quantization_config"))
    return isinstance(given, dict) and given.get("quant_method") is None


def pop_quantization(path: Path, values: dict[str, Any]) -> Quantization | None:
    """The entry of quantization, taken out of the config: transformers would misread the entry."""
    other = values.pop("quantization_config", None)
    given = values.pop("quantization", other)
    if isinstance(given, dict) and given.get("quant_method") is not None:
        method = given["quant_method"]
        raise ValueError(f"{path} is quantized by {method!r}, not in a mode of MLX")
    if given is None:
        return None
    try:
        return Quantization(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config(path: Path, values: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if "model_file" in values:
        raise ValueError(f"{path} needs its own code, {values['model_file']!r}, which is not run")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"{path}: transformers has no model_type {kind!r}")
    if kind in _OTHER_NUMBERS:
        raise ValueError(f"{path}: {kind} is not loaded from MLX, where {_OTHER_NUMBERS[kind]}")
    values.pop("auto_map", None)
    check_counts(path, values)
    with blaming(path, "transformers makes no config of it"):
        config = CONFIG_MAPPING[kind].from_dict(values)
    forget_kernels(path, config)
    return config


class _Source:
    """The tensors of the files, by the model's names and by the checkpoint's."""

    def __init__(self, files: list[str], config: Any) -> None:
        self._opened = ExitStack()
        self._files: dict[str, Any] = {}
        self._found: dict[str, Found] = {}
        self.keys: dict[str, str] = {}  # name in the model: name in the checkpoint
        mlx, ours = PREFIXES.get(config.model_type, ("", ""))
        tied = config.get_text_config().tie_word_embeddings
        for key, found in read_headers(files).items():
            self._found[key] = found
            unused = key.endswith("rotary_emb.inv_freq") or (tied and key.startswith("lm_head."))
            if not unused:  # as mlx-lm drops them
                name = ours + key.removeprefix(mlx) if key.startswith(mlx) else key
                self.keys[name] = key

    def dense_dtype(self) -> torch.dtype | None:
        """The commonest dtype of the tensors that are not quantized."""
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        counts = Counter(
            dtypes[found.dtype]
            for key, found in self._found.items()
            if found.dtype in dtypes and not key.endswith((".scales", ".biases"))
        )
        return counts.most_common(1)[0][0] if counts else None

    def dims(self, key: str) -> int:
        """The number of dimensions of the tensor with that name in the checkpoint."""
        return len(self._found[key].shape)

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, name: str) -> Tensor:
        """The tensor with that name in the model."""
        from safetensors import safe_open

        key = self.keys[name]
        file = self._found[key].file
        if file not in self._files:
            self._files[file] = self._opened.enter_context(safe_open(file, framework="pt"))
        tensor: Tensor = self._files[file].get_tensor(key)
        return tensor


def _fill(
    path: Path,
    model: Any,
    source: _Source,
    quantization: Quantization | None,
    device: torch.device | str,
) -> None:
    wanted, ties = model.state_dict(), tied_names(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    packed = {name.removesuffix(".scales") for name in source.keys if name.endswith(".scales")}
    _check_layers(path, source, packed, quantization)
    left = set(source.keys)
    for owner in sorted(packed):
        format, weight = _packed(path, model, source, owner, quantization)
        put_packed(model, ties[f"{owner}.weight"], weight.to(device), format)
        left -= {f"{owner}.{leaf}" for leaf in ("weight", "scales", "biases")}
    if extra := sorted(left - wanted.keys()):
        raise ValueError(f"{path} has tensors the model does not: {', '.join(extra[:6])}")
    for name in sorted(left):
        value = source.read(name)
        if is_conv1d(model.get_submodule(name.rpartition(".")[0])) and value.dim() == 2:
            value = value.t().contiguous()
        if value.shape != wanted[name].shape:
            raise ValueError(
                f"{path}: {source.keys[name]} is {list(value.shape)}, the model has "
                f"{list(wanted[name].shape)}"
            )
        if wanted[name].is_floating_point() and not value.is_floating_point():
            raise ValueError(f"{path}: {source.keys[name]} is {value.dtype}, not a float dtype")
        put_dense(model, ties.get(name, [name]), value, device)
    given = left | {f"{owner}.weight" for owner in packed}
    filled = {name for target in given for name in ties.get(target, [target])}
    if missing := sorted(parameters - filled):
        raise ValueError(f"{path} has no tensor for {', '.join(missing[:6])}")


def _check_layers(
    path: Path, source: _Source, packed: set[str], quantization: Quantization | None
) -> None:
    """ValueError where the config and the scales tell of different layers."""
    names = {source.keys[f"{owner}.scales"].removesuffix(".scales") for owner in packed}
    if stacked := sorted(n for n in names if source.dims(f"{n}.scales") == 3):
        raise ValueError(
            f"{path} has experts stacked in one tensor, for which there is no packed layer: "
            f"{summary(stacked)}"
        )
    if quantization is None:
        if names:
            raise ValueError(f"{path}: {min(names)} has scales, but config.json no quantization")
        return
    for name, packing in quantization.layers.items():
        if packing is None and name in names:
            raise ValueError(f"{path}: {name} has scales, but the config leaves it dense")
        if packing is not None and name not in names and f"{name}.weight" in source.keys.values():
            raise ValueError(f"{path}: the config quantizes {name}, but {name}.scales is missing")


def _packed(
    path: Path, model: Any, source: _Source, owner: str, quantization: Quantization | None
) -> tuple[str, Tensor]:
    """(format, packed bytes) of a quantized layer, which the model can pack."""
    assert quantization is not None
    key = source.keys[f"{owner}.scales"].removesuffix(".scales")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        raise ValueError(f"{path}: the model has no layer {key}") from None
    if not packable(module) or not replaceable(model, owner):
        raise ValueError(f"{path}: {key} is a {type(module).__name__}, which cannot be packed")
    if f"{owner}.weight" not in source.keys:
        raise ValueError(f"{path}: {key}.weight is missing")
    codes, scales = source.read(f"{owner}.weight"), source.read(f"{owner}.scales")
    biases = source.read(f"{owner}.biases") if f"{owner}.biases" in source.keys else None
    n, k = weight_shape(module)
    try:
        format = quantization.of(key, codes, scales, k).format(scales.dtype)
        if codes.shape[0] != n:
            raise ValueError(f"{key}.weight is {list(codes.shape)}, the model has {n} rows")
        return format, pack(format, codes, scales, biases)
    except ValueError as error:
        said = str(error)
        raise ValueError(f"{path}: {said if key in said else f'{key}: {said}'}") from None

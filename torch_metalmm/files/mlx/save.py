"""Writing a transformers model as an MLX checkpoint that mlx-lm reads."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ...extras import HF, require
from ...models.attach import is_transformers_model, quantized_by_another
from ...models.experts import homes
from ...models.replace import is_conv1d, weight_shape
from ...models.shard.apply import refuse_sharded
from ...models.skeleton import parameters_to_save
from ...nn import QuantEmbedding, QuantLinear
from ..folder import read_config
from ..owned import CONFIG, INDEX, mlx_weights, obsolete_tokenizer, prepare_folder
from ..staging import staged
from .experts import of_block, stored_experts
from .layout import PREFIXES, Packing, config_entry, packing_of, unpack
from .load import pop_quantization

_SHARD = "5GB"  # mlx-lm's own size


def save_mlx(model: Any, tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write a transformers model as an MLX checkpoint, and its tokenizer unless that is None.

    Layers in affine formats, mxfp4, mxfp8 and nvfp4 keep their bits; dense ones are written in
    their dtype. A save that fails or is killed leaves what was there, as save_packed does.
    ValueError: a layer has a format that MLX has not, or gathers its input; experts of
    a type of model whose names mlx-lm has are not known; no transformers model.
    OSError: the folder cannot be written or holds a model that is no MLX checkpoint.
    """
    require("save_mlx", *HF)
    refuse_sharded(model, "save_mlx")
    if not is_transformers_model(model) or quantized_by_another(model):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    tensors, layers = _mlx_tensors(model)
    target = prepare_folder(folder, _replaceable)
    weights = _replaceable(target) or set()

    def obsolete(names: set[str]) -> set[str]:
        return weights if tokenizer is None else weights | obsolete_tokenizer(target)

    with staged(target, obsolete) as staging:
        _write(tensors, staging)
        (staging / CONFIG).write_text(json.dumps(_mlx_config(model, layers), indent=2))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)


def _replaceable(path: Path) -> set[str] | None:
    """The weights in the folder that a save may replace; None if it holds no MLX checkpoint."""
    try:
        quantization = pop_quantization(path, read_config(path))
    except (OSError, ValueError):
        return None
    weights = mlx_weights(path)
    return weights if weights or quantization is not None else None


def _mlx_tensors(model: Any) -> tuple[dict[str, Tensor], dict[str, Packing]]:
    """(tensors, packings of the quantized layers), both by MLX's names."""
    mlx, ours = PREFIXES.get(model.config.model_type, ("", ""))
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Packing] = {}
    experts = homes(model, apart=dict(model.named_modules()))
    for owner, home in experts.items():
        stacks, packings = stored_experts(owner, home, model.config.model_type)
        tensors |= {key: t.contiguous().cpu() for key, t in stacks.items()}
        layers |= packings
    blocks = {
        owner.rpartition(".")[0]: of_block(owner, model.config.model_type) for owner in experts
    }
    for name, module, value in parameters_to_save(model, experts):
        owner, _, leaf = name.rpartition(".")
        key = mlx + owner.removeprefix(ours) if owner.startswith(ours) else owner
        block = next((b for b in blocks if key.startswith(f"{b}.")), None)
        if block is not None:
            key = blocks[block] + key.removeprefix(block)
        if leaf == "input_order":
            raise ValueError(f"{owner} gathers its input, which no layer of MLX does")
        if leaf == "weight" and isinstance(module, QuantLinear | QuantEmbedding):
            parts = unpack(owner, module.format, value, weight_shape(module)[1])
            if "scales" in parts:
                layers[key] = packing_of(module.format)
        else:
            parts = {leaf: value.t() if leaf == "weight" and is_conv1d(module) else value}
        tensors.update({f"{key}.{part}": t.contiguous().cpu() for part, t in parts.items()})
    return tensors, layers


def _mlx_config(model: Any, layers: dict[str, Packing]) -> dict[str, Any]:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    values: dict[str, Any] = config.to_dict()
    values.pop("quantization_config", None)
    values |= _older_names(values, values.get("rope_parameters") or {})
    for name, stored in type(config).attribute_map.items():  # num_experts of num_local_experts
        if stored in values:
            values.setdefault(name, values[stored])
    if layers:
        values["quantization"] = values["quantization_config"] = config_entry(layers)
    return values


def _older_names(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """What mlx-lm looks for under the names that transformers had before its version 5."""
    older: dict[str, Any] = {
        key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope
    }
    if rope:  # none is said, too: GPT-OSS without the word is scaled
        scaled = rope.get("rope_type", "default") != "default"
        older["rope_scaling"] = rope if scaled else None
    if "full_attention" in rope and "sliding_attention" in rope:  # Gemma 3
        older["rope_theta"] = rope["full_attention"]["rope_theta"]
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if values["model_type"] == "gpt2":
        older["n_ctx"] = values["n_positions"]
    return older


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD
    )
    for file, names in plan.filename_to_tensors.items():
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "mlx"})
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    (folder / INDEX).write_text(json.dumps(index, indent=2))

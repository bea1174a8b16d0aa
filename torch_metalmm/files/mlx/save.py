"""Writing a transformers model as an MLX checkpoint that mlx-lm reads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ...extras import HF, require
from ...models.attach import is_transformers_model, quantized_by_another
from ...models.experts import homes
from ...models.mtp import OWN, MtpHead, check_own
from ...models.replace import is_conv1d, weight_shape
from ...models.shard.apply import refuse_sharded
from ...models.skeleton import parameters_to_save
from ...nn import QuantEmbedding, QuantLinear
from ..folder import read_config
from ..gguf.derive import full_attention_interval
from ..heads import HEAD_FILE, published_name
from ..owned import CONFIG, INDEX, mlx_weights, obsolete_tokenizer, prepare_folder
from ..staging import staged
from .experts import of_block, stored_experts
from .latent import MATRIX, SPLIT, split
from .layout import NESTED, PREFIXES, Packing, config_entry, packing_of, unpack
from .load import pop_quantization
from .shifted import SHIFTED, shifted, text_name

_SHARD = "5GB"  # mlx-lm's own size


def save_mlx(
    model: Any, tokenizer: Any, folder: str | os.PathLike[str], head: MtpHead | None = None
) -> None:
    """Write a transformers model as an MLX checkpoint, and its tokenizer unless that is None.

    head: the model's own for later tokens, of load_mtp, by the names of published checkpoints and
    in mtp.safetensors, which load_mtp reads and mlx-lm does not.
    Layers in affine formats, mxfp4, mxfp8 and nvfp4 keep their bits; dense ones are written in
    their dtype. In the model's dtype are, rounded: the packed matrix of DeepSeek-V3's latent, as
    the two stacks that mlx-lm makes of it, and norms of Qwen3-Next and Qwen3.5, to which mlx-lm
    adds 1; those of a head are as the head has them. A save that fails or is killed leaves what was
    there, as save_packed does.
    ValueError: a layer has a format that MLX has not, or gathers its input; experts of
    a type of model whose names mlx-lm has are not known; no transformers model; the head is of
    another; layers of full attention not at an interval, which is all that mlx-lm knows of.
    OSError: the folder cannot be written or holds a model that is no MLX checkpoint.
    """
    require("save_mlx", *HF)
    from safetensors.torch import save_file

    refuse_sharded(model, "save_mlx")
    if not is_transformers_model(model) or quantized_by_another(model):
        raise ValueError(f"model must be a transformers model, got {type(model).__name__}")
    if head is not None:
        check_own(head, model)
    kind = model.config.model_type
    tensors, layers = _mlx_tensors(model, shifted if kind in SHIFTED else lambda name, value: value)
    of_head, packings = ({}, {}) if head is None else _head_tensors(head, model)
    config = _mlx_config(model, layers | packings)
    target = prepare_folder(folder, _replaceable)
    weights = _replaceable(target) or set()

    def obsolete(names: set[str]) -> set[str]:
        old = weights | {n for n in (HEAD_FILE,) if (target / n).is_file()}
        return old if tokenizer is None else old | obsolete_tokenizer(target)

    with staged(target, obsolete) as staging:
        _write(tensors, staging)
        if of_head:
            save_file(of_head, staging / HEAD_FILE, metadata={"format": "mlx"})
        (staging / CONFIG).write_text(json.dumps(config, indent=2))
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


def _mlx_tensors(
    model: Any, convert: Callable[[str, Tensor], Tensor] = lambda name, value: value
) -> tuple[dict[str, Tensor], dict[str, Packing]]:
    """(tensors, packings of the quantized layers), both by MLX's names.

    convert(name, value) is what MLX has of a tensor of the model.
    """
    kind = model.config.model_type
    mlx, ours = PREFIXES.get(kind, ("", ""))
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Packing] = {}
    experts = homes(model, apart=dict(model.named_modules()))
    for owner, home in experts.items():
        stacks, packings = stored_experts(owner, home, kind)
        tensors |= {mlx + key: t.contiguous().cpu() for key, t in stacks.items()}
        layers |= {mlx + key: packing for key, packing in packings.items()}
    blocks = {owner.rpartition(".")[0]: of_block(owner, kind) for owner in experts}
    for name, module, value in parameters_to_save(model, experts):
        owner, _, leaf = name.rpartition(".")
        block = next((b for b in blocks if owner.startswith(f"{b}.")), None)
        key = owner if block is None else blocks[block] + owner.removeprefix(block)
        key = mlx + key.removeprefix(ours) if key.startswith(ours) else key
        if kind in SPLIT and owner.endswith(MATRIX) and isinstance(module, QuantLinear):
            place, matrix = owner.rpartition(".")[0], module.dequantize().to(model.dtype)
            parts, key = split(model.get_submodule(place), matrix), key.rpartition(".")[0]
        else:
            parts = _parts(owner, leaf, module, convert(name, value))
        if isinstance(module, QuantLinear | QuantEmbedding) and "scales" in parts:
            layers[key] = packing_of(module.format)
        tensors.update({f"{key}.{part}": t.contiguous().cpu() for part, t in parts.items()})
    return tensors, layers


def _parts(owner: str, leaf: str, module: Any, value: Tensor) -> dict[str, Tensor]:
    """{leaf: what MLX has} of a parameter of the layer. ValueError as save_mlx."""
    if leaf == "input_order":
        raise ValueError(f"{owner} gathers its input, which no layer of MLX does")
    if leaf == "weight" and isinstance(module, QuantLinear | QuantEmbedding):
        return unpack(owner, module.format, value, weight_shape(module)[1])
    return {leaf: value.t() if leaf == "weight" and is_conv1d(module) else value}


def _head_tensors(head: MtpHead, model: Any) -> tuple[dict[str, Tensor], dict[str, Packing]]:
    """The tensors of a head and its packings by layer, as _mlx_tensors gives a model's."""
    tensors, layers = _mlx_tensors(head.block)
    for owner in OWN:
        module = head.get_submodule(owner)
        parts = _parts(owner, "weight", module, module.get_parameter("weight").detach())
        if isinstance(module, QuantLinear) and "scales" in parts:
            layers[owner] = packing_of(module.format)
        tensors |= {f"{owner}.{part}": t.contiguous().cpu() for part, t in parts.items()}
    names = {key: published_name(model, text_name(key) or "") for key in tensors}
    found = {name: tensors[key] for key, name in names.items() if name is not None}
    named = {names[f"{layer}.weight"]: packing for layer, packing in layers.items()}
    return found, {n.removesuffix(".weight"): p for n, p in named.items() if n is not None}


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
    if config.model_type in SHIFTED:
        every = values["full_attention_interval"] = full_attention_interval(config)
        if every is None:
            raise ValueError(
                f"model: layer_types {config.layer_types}; allowed: full attention at an interval"
            )
    if config.model_type in NESTED:
        values = {"model_type": NESTED[config.model_type], "text_config": values}
    if layers:
        values["quantization"] = values["quantization_config"] = config_entry(layers)
    return values


def _older_names(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The entries that mlx-lm looks for under the names of transformers before version 5."""
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

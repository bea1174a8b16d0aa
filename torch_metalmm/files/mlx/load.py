"""Loading MLX checkpoints as transformers models whose weights stay packed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import formats
from ...extras import HF, require, uncollected
from ...models.integers.affine import Rows
from ...models.replace import weight_shape
from ...models.shard.apply import shard_, whole_shape
from ...models.shard.plan import refuse_experts
from ...models.skeleton import empty_model, put_packed, tied_names
from ...nn.sharded import Sharded
from ..blame import blaming
from ..fill import fill, finish, layer_of
from ..folder import read_config, read_tokenizer
from ..headers import read_headers
from ..heads import of_heads
from ..source import Source
from ..untrusted import config_of
from .experts import put_experts, rename
from .latent import put_latents
from .layout import LEAVES, PREFIXES, Quantization, pack, part_of_planes, planes_of
from .shifted import SHIFTED, is_shifted, text_name, unshifted

# mlx-lm's loader changes these models' numbers, so that they are not transformers'.
_OTHER_NUMBERS = {
    "step3p5": "1 is added to norm weights",
    "falcon_h1": "projections are multiplied by the model's factors",
    "baichuan_m1": "the output head is normalized",
}


@uncollected()
def load_mlx(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    plan: Mapping[str, str] | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of an MLX checkpoint of mlx-lm; no tokenizer in the folder gives None.

    Quantized layers become QuantLinear and QuantEmbedding with the same values, bit for bit: affine
    with 2 to 8 bits, groups of 32, 64, 128 and scales of any float dtype, mxfp4, mxfp8 and nvfp4
    (the last two where K is a multiple of 64). Experts become QuantExperts. A layer whose weight
    transformers multiplies by itself, as routers do, is decoded, and so are the two stacks of
    DeepSeek-V3's latent, one matrix in the model. dtype is that of activations and unpacked
    weights, by default that of the checkpoint's unpacked tensors. Every model*.safetensors of the
    folder is read; its index is not, since it is often that of the model before quantization. The
    model is frozen and in eval mode.
    With a mesh, this rank loads and reads its part of the model, as shard_(model, mesh, plan).

    OSError: a file is missing. ValueError: not such a checkpoint, a mode or size without a format
    here, tensors that contradict the config or the model, an architecture of which MLX stores other
    numbers than transformers. Nothing in the folder is executed.
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
        headers = read_headers(files)
        source = Source(path, files, config, _renamed(config, headers))
        if is_shifted(config.model_type, headers.values()):
            source.convert = unshifted
        found = source.dense_dtype((".scales", ".biases"))
        model = empty_model(config, dtype or found or config.dtype or torch.float32)
    if mesh is not None:
        refuse_experts(model)  # before their tensors are read; shard_ would do it after that
    with source:
        put(model, source, quantization, device, mesh, plan)
    return finish(path, model), read_tokenizer(path)


def put(
    model: Any,
    source: Source,
    quantization: Quantization | None,
    device: torch.device | str,
    mesh: Any = None,
    plan: Mapping[str, str] | None = None,
    done: Collection[str] = (),
) -> None:
    """Fill the empty model, in which the parameters `done` are, with what the source has."""
    of_experts = rename(model, source.keys)
    source.keys = {of_experts(name): key for name, key in source.keys.items()}
    owners = {name.removesuffix(".scales") for name in source.keys if name.endswith(".scales")}
    _check_layers(source, owners, quantization)
    experts = put_experts(model, source, quantization, device)
    latents = put_latents(model, source, quantization, device)
    owners = {name for name in owners if f"{name}.scales" in source.keys}
    packed = {o: [n for n in (f"{o}.{e}" for e in LEAVES) if n in source.keys] for o in owners}
    if mesh is not None:
        _put_empty(model, source, quantization, owners)
        shard_(model, mesh, plan)
    rows = partial(_packed, source, quantization)
    fill(model, source, packed, rows, device, {*experts, *latents, *done})


def _renamed(config: Any, keys: Collection[str]) -> Callable[[str], str | None]:
    """The model's name of a tensor, but of experts, from the checkpoint's; None: it has none."""
    mlx, ours = PREFIXES.get(config.model_type, ("", ""))
    heads = of_heads(keys)  # load_mtp reads them

    def renamed(key: str) -> str | None:
        if key in heads:
            return None
        if config.model_type in SHIFTED:
            return text_name(key)
        return ours + key.removeprefix(mlx) if key.startswith(mlx) else key

    return renamed


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
    if "model_file" in values:
        raise ValueError(f"{path} needs its own code, {values['model_file']!r}, which is not run")
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in _OTHER_NUMBERS:
        raise ValueError(f"{path}: {kind} is not loaded from MLX, where {_OTHER_NUMBERS[kind]}")
    config = config_of(path, values)
    text = config.get_text_config(decoder=True)
    return text if text.model_type in SHIFTED else config


def _check_layers(source: Source, packed: set[str], quantization: Quantization | None) -> None:
    """ValueError where the config and the scales tell of different layers."""
    names = {_key(source, owner) for owner in packed}
    if quantization is None:
        if names:
            raise ValueError(
                f"{source.path}: {min(names)} has scales, but config.json no quantization"
            )
        return
    for name, packing in quantization.layers.items():
        if packing is None and name in names:
            raise ValueError(f"{source.path}: {name} has scales, but the config leaves it dense")
        if packing is not None and name not in names and f"{name}.weight" in source.keys.values():
            raise ValueError(
                f"{source.path}: the config quantizes {name}, but {name}.scales is missing"
            )


def _put_empty(
    model: Any, source: Source, quantization: Quantization | None, owners: set[str]
) -> None:
    """Packed layers without data, from whose formats and sizes shard_ sees what to divide."""
    ties = tied_names(model)
    for owner in sorted(owners):
        layer = layer_of(model, source, owner, [f"{owner}.scales"])
        n, k = weight_shape(layer)
        format, _ = planes_of(source, quantization, owner, (n, k), f"{n} rows")
        row = formats.get(format).row_bytes(k)
        empty = torch.empty(n, row, dtype=torch.uint8, device="meta")
        put_packed(model, ties[f"{owner}.weight"], empty, format)


def _packed(
    source: Source, quantization: Quantization | None, owner: str, module: nn.Module
) -> Rows:
    """The packed bytes of a quantized layer, of a sharded one this rank's."""
    n, k = whole_shape(module)
    format, planes = planes_of(source, quantization, owner, (n, k), f"{n} rows")
    if isinstance(module, Sharded):
        planes = part_of_planes(module.shard, planes)
    with blaming(source.path, _key(source, owner)):
        return Rows(format, pack(format, *planes))


def _key(source: Source, owner: str) -> str:
    """The checkpoint's name of a quantized layer."""
    return source.keys[f"{owner}.scales"].removesuffix(".scales")

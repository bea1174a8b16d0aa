"""The quantization that an MLX checkpoint states, and its tensors as our packed bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import formats
from ...formats._planes import Planes
from ...nn.sharded import Shard
from ..blame import blaming
from ..source import Source

# Names that mlx-lm has otherwise: model_type -> (its prefix, transformers')
NESTED = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}  # the text of what sees
PREFIXES = {"gpt2": ("model.", "transformer.")} | dict.fromkeys(NESTED, ("language_model.", ""))

# mode -> group_size, bits; of all but affine the only ones, and the name of the format
_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
LEAVES = ("weight", "scales", "biases")  # tensors of a quantized layer; the last is affine's
_FIELDS = ("group_size", "bits", "mode")


@dataclass(frozen=True)
class Packing:
    """The quantization of one MLX layer."""

    group_size: int
    bits: int
    mode: str = "affine"

    def format(self, scales: torch.dtype) -> str:
        """The format with the same values. ValueError: there is none."""
        sizes = self.group_size, self.bits
        if self.mode != "affine" and sizes == _DEFAULTS[self.mode] and scales == torch.uint8:
            return self.mode
        try:
            if self.mode == "affine":
                return formats.affine(self.bits, self.group_size, scales).name
        except ValueError:
            pass
        raise ValueError(
            f"{self.mode}, {self.bits} bits, groups of {self.group_size}, {scales} scales "
            "has no format here; there are affine with 2, 3, 4, 5, 6 or 8 bits, groups of 32, "
            "64 or 128 and float scales, mxfp4 and mxfp8 with groups of 32, nvfp4 with groups of 16"
        )


class Quantization:
    """The entry "quantization" of config.json: a packing for all layers, and for some their own."""

    def __init__(self, value: Any) -> None:
        """ValueError: not of that form."""
        if not isinstance(value, Mapping):
            raise ValueError(f"quantization must be an object, got {value!r}")
        self.default = _packing("quantization", value)
        self.layers: dict[str, Packing | None] = {}
        for name, entry in value.items():
            if name in _FIELDS:
                continue
            if isinstance(entry, Mapping):
                self.layers[name] = _packing(f"quantization[{name!r}]", entry)
            elif entry is False:
                self.layers[name] = None
            elif entry is not True and "." in name:
                raise ValueError(
                    f"quantization[{name!r}] must be an object, true or false, got {entry!r}"
                )

    def of(self, name: str, codes: Tensor, scales: Tensor, k: int) -> Packing:
        """The packing of the layer `name` of K inputs, which has these tensors.

        The order is mlx-lm's: what the config says of that very layer, else what the shapes say
        (the default may be that of other layers). ValueError, without the name: config and shapes
        contradict each other.
        """
        stated = self.layers.get(name)
        if codes.dtype != torch.uint32 or codes.dim() != 2 or scales.dim() != 2:
            raise ValueError(
                "weight must be uint32 [N, K * bits / 32] and scales [N, K / group_size], "
                f"got {codes.dtype} {list(codes.shape)} and {scales.dtype} {list(scales.shape)}"
            )
        groups, words = scales.shape[1], codes.shape[1]
        if 0 in (k, groups) or k % groups or words * 32 % k:
            raise ValueError(
                f"weight {list(codes.shape)} and scales {list(scales.shape)} are no rows of {k} "
                "inputs"
            )
        sizes = k // groups, words * 32 // k
        if stated is not None:
            mode = stated.mode
        elif scales.is_floating_point():
            mode = "affine"
        else:
            mode = next((m for m, s in _DEFAULTS.items() if m != "affine" and s == sizes), "mxfp4")
        shown = Packing(*sizes, mode)
        if stated is not None and stated != shown:
            raise ValueError(f"the config says {stated}, its tensors have {shown}")
        return shown


def _packing(where: str, entry: Mapping[str, Any]) -> Packing:
    mode = entry.get("mode", "affine")
    if mode not in _DEFAULTS:
        raise ValueError(
            f"{where}: the mode {mode!r} is not supported; there are {', '.join(_DEFAULTS)}"
        )
    group_size, bits = _DEFAULTS[mode]
    # mlx-lm's mixed recipes write null where the mode's default holds.
    given = {key: entry.get(key) for key in ("group_size", "bits")}
    defaults = {"group_size": group_size, "bits": bits}
    values = {key: defaults[key] if n is None else n for key, n in given.items()}
    for key, number in values.items():
        if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
            raise ValueError(f"{where}: {key} must be a positive integer, got {number!r}")
    return Packing(**values, mode=mode)


def planes_of(
    source: Source, quantization: Quantization | None, name: str, shape: Sequence[int], count: str
) -> tuple[str, list[Tensor]]:
    """(format, [codes, scales and, where it has them, biases], each [N, ...]) of the quantized
    layer `name` of this shape, [N, K], or of a stack, [E, rows, K].

    count: its rows in words. ValueError: codes are missing, or a tensor does not fit the others,
    the config or the shape.
    """
    assert quantization is not None
    key = source.keys[f"{name}.scales"].removesuffix(".scales")
    given = [leaf for leaf in LEAVES if f"{name}.{leaf}" in source.keys]
    if given[0] != LEAVES[0]:
        raise ValueError(f"{source.path}: {key}.weight is missing")
    whole = [source.read(f"{name}.{leaf}") for leaf in given]
    is_stack, weight = len(shape) > 2, whole[0].shape
    planes = [p.flatten(0, 1) if is_stack and p.dim() == len(shape) else p for p in whole]
    codes, scales, *biases = planes
    with blaming(source.path, key):
        format = quantization.of(key, codes, scales, shape[-1]).format(scales.dtype)
        if weight[:-1] != (*shape[:-1],):
            raise ValueError(f"weight is {[*weight]}, the model has {count}")
        if is_stack and any(p.shape[:-1] != weight[:-1] for p in whole):  # else pack() tells
            raise ValueError(f"scales and biases are not those of {count}")
        check_planes(format, *biases)
    return format, planes


def check_planes(format: str, biases: Tensor | None = None) -> None:
    """ValueError: a layer of the format has no biases, or must have them."""
    planes = isinstance(formats.get(format), Planes)
    if planes and biases is not None:
        raise ValueError(f"{format} has no biases")
    if not planes and biases is None:
        raise ValueError("biases are missing")


def pack(format: str, *planes: Tensor) -> Tensor:
    """uint8 [N, row_bytes] of an MLX layer's codes, scales and, where it has them, biases.

    ValueError: they do not fit the format.
    """
    spec: Any = formats.get(format)
    packed: Tensor = spec.pack(*planes)
    return packed


def part_of_planes(shard: Shard, planes: list[Tensor]) -> list[Tensor]:
    """This rank's rows or columns of a layer's codes, scales and biases."""
    begin, end = shard.range
    if shard.rows:
        return [plane[begin:end] for plane in planes]
    spec: Any = formats.get(shard.format)
    group = spec.group if isinstance(spec, Planes) else spec.block_values
    codes, *others = planes
    part = codes[:, begin * spec.bits // 32 : end * spec.bits // 32]
    return [part, *(plane[:, begin // group : end // group] for plane in others)]


def unpack(name: str, format: str, packed: Tensor, k: int) -> dict[str, Tensor]:
    """{"weight", "scales", "biases"} of the layer as MLX has it, of a dense format {"weight"}.

    ValueError: MLX has no such format.
    """
    spec, packed = formats.get(format), packed.contiguous()
    if isinstance(spec, Planes):
        return dict(zip(("weight", "scales"), spec.unpack(packed, k), strict=True))
    if isinstance(spec, formats.Affine):
        return dict(zip(("weight", "scales", "biases"), spec.unpack(packed, k), strict=True))
    if format not in formats.DTYPES:
        raise ValueError(
            f"{name} is {format}, which MLX has not: quantize_ the model to an affine format, "
            "mxfp4, mxfp8 or nvfp4 first"
        )
    return {"weight": packed.view(formats.DTYPES[format])}


def packing_of(format: str) -> Packing:
    """The MLX packing of an affine format, or of one whose name is a mode."""
    spec = formats.get(format)
    if isinstance(spec, formats.Affine):
        return Packing(spec.block_values, spec.bits)
    return Packing(*_DEFAULTS[format], mode=format)


def config_entry(layers: dict[str, Packing]) -> dict[str, Any]:
    """The entry "quantization" for these layers: the commonest packing, the others by name."""
    default = Counter(layers.values()).most_common(1)[0][0]
    return vars(default) | {n: dict(vars(p)) for n, p in layers.items() if p != default}

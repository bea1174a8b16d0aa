"""The experts of MLX checkpoints: a stack [E, N, ...] each for gate, up and down.

mlx-lm calls the module switch_mlp, or experts, in a block of one name or another; transformers has
names of its own. Which is which is read from a checkpoint: of a layer, one module has such stacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import formats
from ...formats._bits import as_bytes
from ...models.experts import Home, dense_format, homes
from ...nn.experts import DOWN, GATE, GATE_UP, UP, QuantExperts
from ...nn.place import place
from ..blame import blaming
from ..source import Source
from .layout import LEAVES, Packing, Quantization, pack, packing_of, planes_of, unpack

_STACK = re.compile(
    r"(?P<block>.*\.layers\.(?P<layer>\d+)\.\w+)\.(switch_mlp|experts)\.(gate|up|down)_proj\."
)
_MODULES = {"dots1": "experts", "gpt_oss": "experts"}
# model_type: mlx-lm's name of the block that transformers calls mlp
_BLOCKS = {
    "deepseek_v3": "mlp",
    "dots1": "mlp",
    "glm4_moe": "mlp",
    "glm4_moe_lite": "mlp",
    "gpt_oss": "mlp",
    "mixtral": "block_sparse_moe",
    "olmoe": "mlp",
    "qwen2_moe": "mlp",
    "qwen3_5_moe_text": "mlp",
    "qwen3_moe": "mlp",
    "qwen3_next": "mlp",
}


def rename(model: Any, keys: Iterable[str]) -> Callable[[str], str]:
    """The model's name of a tensor, from the checkpoint's, which are `keys`.

    The model is dense and may be on the meta device.
    """
    places = {}  # by the number of their layer
    for name in homes(model):
        number = re.search(r"\.layers\.(\d+)\.", name)
        if number is not None:
            places[number[1]] = name
    blocks: dict[str, tuple[str, str]] = {}
    for match in filter(None, map(_STACK.match, keys)):
        if match["layer"] in places:
            ours = places[match["layer"]]
            blocks[match["block"]] = ours.rpartition(".")[0], ours.rpartition(".")[2]

    def renamed(key: str) -> str:
        match = re.match(r"(.*\.layers\.\d+\.\w+)\.(.*)", key)
        if match is None or match[1] not in blocks:
            return key
        block, experts = blocks[match[1]]
        rest = re.sub(r"^(switch_mlp|experts)\.(?=\w+_proj\.)", f"{experts}.", match[2])
        return f"{block}.{rest.replace('router.layer.', 'router.')}"

    return renamed


def put_experts(
    model: Any,
    source: Source,
    quantization: Quantization | None,
    device: torch.device | str,
) -> set[str]:
    """Give the model its packed experts; their tensors leave source.keys. The parameters' names.

    ValueError: a stack is missing, or does not fit the model or the config.
    """
    done: set[str] = set()
    names = {name for name in dict(model.named_modules()) if f"{name}.{DOWN}.weight" in source.keys}
    for name, home in homes(model, apart=names).items():
        if name not in names:
            continue  # dense, as transformers has it
        for stack, part in home.stacks.items():
            format, rows = rows_of(source, quantization, f"{name}.{stack}", part.shape)
            part.put(model, [f"{name}.{stack}"], place(rows, device), format)
        for bias in [n for n, _ in home.made.named_parameters() if n.endswith("_bias")]:
            _put_bias(source, name, home.made, bias, device)
        done.update(f"{name}.{leaf}" for leaf, _ in home.made.named_parameters())
    return done


def rows_of(
    source: Source,
    quantization: Quantization | None,
    name: str,
    shape: tuple[int, int, int],
    each: str = "experts",
) -> tuple[str, Tensor]:
    """(format, uint8 [E rows, row_bytes]) of a stack [E, rows, K], which leaves source.keys.

    each: what has a matrix of the stack. ValueError as put_experts.
    """
    e, rows, _ = shape
    if f"{name}.weight" not in source.keys:
        raise ValueError(f"{source.path} has no tensor for {name}, of {e} {each}")
    if f"{name}.scales" in source.keys:
        format, planes = planes_of(source, quantization, name, shape, f"{e} {each} of {rows} rows")
        key = source.keys[f"{name}.weight"].removesuffix(".weight")
        for leaf in LEAVES:
            source.keys.pop(f"{name}.{leaf}", None)
        with blaming(source.path, key):
            return format, pack(format, *planes)
    key, values = source.keys[f"{name}.weight"], source.take(f"{name}.weight")
    if values.shape != shape or not values.is_floating_point():
        raise ValueError(
            f"{source.path}: {key} is {values.dtype} {list(values.shape)}, no floats "
            f"{list(shape)}, and has no scales"
        )
    format = dense_format(values)
    return format, as_bytes(values.to(formats.DTYPES[format]).flatten(0, 1))


def _put_bias(source: Source, name: str, made: QuantExperts, bias: str, device: Any) -> None:
    own = made.get_parameter(bias)
    stacks = (GATE, UP) if bias == f"{GATE_UP}_bias" else (bias.removesuffix("_bias"),)
    size = *own.shape[:-1], own.shape[-1] // len(stacks)
    values = [source.take_as(f"{name}.{stack}.bias", size, own.dtype) for stack in stacks]
    setattr(made, bias, nn.Parameter(torch.cat(values, -1).to(device), requires_grad=False))


def stored_experts(
    name: str, home: Home, kind: str
) -> tuple[dict[str, Tensor], dict[str, Packing]]:
    """(tensors, packings of the quantized ones) of a module of experts, by mlx-lm's names.

    kind: the model's type. ValueError: a format that MLX does not have, a type that is not known.
    """
    place = f"{of_block(name, kind)}.{_MODULES.get(kind, 'switch_mlp')}"
    tensors: dict[str, Tensor] = {}
    packings: dict[str, Packing] = {}
    for stack, part in home.stacks.items():
        format = part.format or dense_format(part.weight)
        if part.format is None:
            parts = {"weight": part.dense().view(part.shape)}
            planes = {stack: parts}
        else:
            planes = {}
            for leaf, rows in _split(home.made, stack, part.weight.detach()):
                unpacked = unpack(f"{name}.{stack}", format, rows.flatten(0, 1), part.shape[2])
                planes[leaf] = {n: t.view(*rows.shape[:2], -1) for n, t in unpacked.items()}
        for leaf, tensors_of in planes.items():
            if "scales" in tensors_of:
                packings[f"{place}.{leaf}"] = packing_of(format)
            tensors |= {f"{place}.{leaf}.{kind_of}": t for kind_of, t in tensors_of.items()}
    for bias, value in home.made.named_parameters():
        if bias.endswith("_bias"):
            for leaf, rows in _split(home.made, bias.removesuffix("_bias"), value.detach()):
                tensors[f"{place}.{leaf}.bias"] = rows
    return tensors, packings


def of_block(name: str, kind: str) -> str:
    """mlx-lm's name of the block that has the experts of that name.

    ValueError: it is not known for models of the type.
    """
    if kind not in _BLOCKS:
        raise ValueError(f"{name}: mlx-lm's names of experts are not known for {kind} models")
    return f"{name.rsplit('.', 2)[0]}.{_BLOCKS[kind]}"


def _split(made: QuantExperts, stack: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """[(stack in a checkpoint, what it has of the value)]."""
    if stack != GATE_UP:
        return [(stack, value)]
    return list(zip((GATE, UP), made.rows_of_both(value), strict=True))

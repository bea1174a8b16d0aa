"""The experts of a GGUF file, which stay packed: which tensors are stacks of which module.

A file has gate and up apart, blk.3.ffn_gate_exps and blk.3.ffn_up_exps, each [E, N, K]; so has the
packed module then, whose stacks are views of the file. Their names are GGUF's own, the same in all
architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from ... import formats
from ...models.experts import Home, dense_format, homes
from ...models.ggml import type_names
from ...nn.experts import DOWN, GATE, GATE_UP, UP, QuantExperts
from ...nn.place import place
from .file import GgufFile
from .map import layer_of

# The stacks of a packed module, and what files call them; gate_up has gate's rows, then up's.
_LEAVES = {
    GATE: "ffn_gate_exps",
    UP: "ffn_up_exps",
    GATE_UP: "ffn_gate_up_exps",
    DOWN: "ffn_down_exps",
}


@dataclass
class Experts:
    """A module of experts of the model: its name and home, and its tensors {stack: name}."""

    name: str
    home: Home
    stacks: dict[str, str]
    biases: dict[str, list[str]]  # parameter: the tensors that it is made of, one after the other

    @property
    def tensors(self) -> set[str]:
        return {*self.stacks.values(), *(n for names in self.biases.values() for n in names)}

    @property
    def parameters(self) -> set[str]:
        """Names in the dense model."""
        structure = self.home.structure
        assert structure is not None
        return {f"{self.name}.{leaf}" for leaf in (*structure.stacks, *structure.biases)}


def experts_of(file: GgufFile, model: Any) -> list[Experts]:
    """The experts of the model, and what the file has of them.

    ValueError: a tensor of them is missing or has another shape, or they are one by one.
    """
    apart = [name for name, _ in model.named_modules() if _name(name, GATE_UP) not in file.tensors]
    found = []
    for name, home in homes(model, apart).items():
        made = home.made
        if _name(name, DOWN) not in file.tensors and _one_by_one(name) in file.tensors:
            raise ValueError(
                f"{file.path} has its experts one by one ({_one_by_one(name)}), as files of 2023 "
                "do: convert the model again"
            )
        if GATE_UP in made.formats and made.gate.interleaved:
            raise ValueError(f"{file.path}: {_name(name, GATE_UP)}: its rows must alternate here")
        stacks = {stack: _name(name, stack) for stack in made.formats}
        biases: dict[str, list[str]] = {}
        for bias in (b for b in made._parameters if b.endswith("_bias")):
            stack = bias.removesuffix("_bias")
            parts = (GATE, UP) if stack == GATE_UP and GATE in stacks else (stack,)
            biases[bias] = [_name(name, part, "bias") for part in parts]
        item = Experts(name, home, stacks, biases)
        _check(file, item)
        found.append(item)
    return found


def _name(name: str, stack: str, kind: str = "weight") -> str:
    return f"blk.{layer_of(f'{name}.')}.{_LEAVES[stack]}.{kind}"


def _one_by_one(name: str) -> str:
    return f"blk.{layer_of(f'{name}.')}.ffn_down.0.weight"


def _check(file: GgufFile, item: Experts) -> None:
    """ValueError: a tensor is missing or not of the model's shape."""
    made = item.home.made
    e = made.num_experts
    wanted: dict[str, tuple[int, ...]] = {
        tensor: (e, *made.shape(stack)) for stack, tensor in item.stacks.items()
    }
    for bias, tensors in item.biases.items():
        rows = made.get_parameter(bias).shape[1] // len(tensors)
        wanted |= dict.fromkeys(tensors, (e, rows))
    for tensor, shape in wanted.items():
        entry = file.tensors.get(tensor)
        if entry is None:
            raise ValueError(
                f"{file.path} has no tensor {tensor}, for the model's {item.name} of {e} experts"
            )
        if entry.shape != shape:
            raise ValueError(
                f"{file.path}: tensor {tensor!r} is {list(entry.shape)}, but the model's "
                f"{item.name} makes it {list(shape)}"
            )


def put_experts(model: Any, file: GgufFile, item: Experts, device: torch.device | str) -> None:
    """Give the model the packed experts; on the CPU their stacks are views of the file."""
    for bias, tensors in item.biases.items():
        dtype = item.home.made.get_parameter(bias).dtype
        value = torch.cat([file.dense(tensor) for tensor in tensors], -1)
        setattr(item.home.made, bias, nn.Parameter(value.to(device, dtype), False))
    for stack, tensor in item.stacks.items():
        name, format = f"{item.name}.{stack}", file.tensors[tensor].format
        item.home.stacks[stack].put(model, [name], place(file.packed(tensor), device), format)


def stored_experts(name: str, home: Home) -> dict[str, tuple[Tensor, str]]:
    """{name in a file: (tensor, format)} of a module of experts, gate and up apart.

    The home is one with gate and up apart, if its module is dense. ValueError: a format that GGUF
    does not have.
    """
    tensors: dict[str, tuple[Tensor, str]] = {}
    for stack, part in home.stacks.items():
        if part.format is None:
            format = dense_format(part.weight)
            value = part.dense().view(part.shape).to(formats.DTYPES[format])
        else:
            check_format(f"{name}.{stack}", part.format)
            format, value = part.format, part.weight.detach()
        _add(tensors, home.made, name, stack, "weight", value.cpu(), format)
    for bias, rows in home.made.named_parameters():
        if bias.endswith("_bias"):
            value = rows.detach().float().cpu()
            _add(tensors, home.made, name, bias.removesuffix("_bias"), "bias", value, "f32")
    return tensors


def _add(
    tensors: dict[str, tuple[Tensor, str]],
    made: QuantExperts,
    name: str,
    stack: str,
    kind: str,
    value: Tensor,
    format: str,
) -> None:
    """Add what is stored of a weight or bias, that of gate and up as two."""
    if stack != GATE_UP:
        tensors[_name(name, stack, kind)] = value, format
        return
    for part, half in zip((GATE, UP), made.rows_of_both(value), strict=True):
        tensors[_name(name, part, kind)] = half, format


def check_format(name: str, format: str) -> None:
    """ValueError: GGUF does not have the format, or the installed gguf cannot write it."""
    from gguf import GGMLQuantizationType

    if format not in type_names().values():
        raise ValueError(
            f"{name} is {format}, which GGUF does not have: quantize_ the model to a GGML format"
        )
    if format.upper() not in GGMLQuantizationType.__members__:
        raise ValueError(
            f"{name} is {format}, which the installed gguf {version('gguf')} cannot write: install "
            "a newer one, or quantize_ the model to another GGML format"
        )

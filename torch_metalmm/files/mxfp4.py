"""The experts of GPT-OSS checkpoints: stacks of mxfp4, codes and scales in a tensor each.

<experts>.<stack>_blocks uint8 [E, rows, K / 32, 16] has two codes a byte, the first low; _scales
uint8 [E, rows, K / 32]. Rows lie as in the dense model, those of gate and up in turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..formats.codebook import MXFP4
from ..models.experts import homes
from ..nn.place import place
from .source import Source

_BLOCKS, _SCALES, _CODES = "_blocks", "_scales", 16  # bytes of codes in a block


def put_experts(model: Any, source: Source, device: torch.device | str) -> set[str]:
    """Give the model its packed experts; their tensors leave source.keys. The parameters' names.

    ValueError: the checkpoint has no such stacks, one is missing, or does not fit the model.
    """
    done: set[str] = set()
    for name, home in homes(model).items():
        for stack, part in home.stacks.items():
            rows = _rows(source, f"{name}.{stack}", part.shape)
            part.put(model, [f"{name}.{stack}"], place(rows, device), MXFP4.name)
        for bias, own in list(home.made.named_parameters()):
            if bias.endswith("_bias"):
                value = source.take_as(f"{name}.{bias}", tuple(own.shape), own.dtype)
                setattr(home.made, bias, nn.Parameter(value.to(device), requires_grad=False))
        done.update(f"{name}.{leaf}" for leaf, _ in home.made.named_parameters())
    if not done:
        raise ValueError(
            f"{source.path}: its model has no experts, which alone are mxfp4 in a checkpoint"
        )
    return done


def _rows(source: Source, name: str, shape: tuple[int, int, int]) -> Tensor:
    """uint8 [E rows, row_bytes] of a stack."""
    e, rows, k = shape
    spec = formats.get(MXFP4.name)
    assert isinstance(spec, MXFP4)
    if k % spec.group:
        raise ValueError(f"{source.path}: {name} has K = {k}, no multiple of {spec.group}")
    scaled = (e, rows, k // spec.group)
    codes = source.take_as(name + _BLOCKS, (*scaled, _CODES), torch.uint8)
    scales = source.take_as(name + _SCALES, scaled, torch.uint8)
    packed = torch.empty(e, rows, spec.row_bytes(k), dtype=torch.uint8)
    for i in range(e):  # one by one: a byte for each code
        words = codes[i].flatten(1).contiguous().view(torch.uint32)
        try:
            packed[i] = spec.pack(words, scales[i])
        except ValueError as error:
            raise ValueError(f"{source.path}: {name} of expert {i}: {error}") from None
    return packed.flatten(0, 1)

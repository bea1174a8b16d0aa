"""Rows of several tensors of a file as one packed matrix: the formats that allow it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import get
from .file import GgufFile

# A block of q5_k is one of q4_k with the fifth bits of its codes, 32 bytes behind the first 16:
# without them its values are the same. llama.cpp's Q4_K_M has the two formats side by side in
# attn_qkv and attn_gate of Qwen3-Next.
_NARROW, _WIDE = "q4_k", "q5_k"
_BEFORE, _FIFTH = 16, 32


def common_format(formats: set[str]) -> str | None:
    """The format in which rows of these formats are one matrix, of the same values; None: none."""
    if len(formats) == 1:
        return next(iter(formats))
    return _WIDE if formats == {_NARROW, _WIDE} else None


def joined_rows(file: GgufFile, sources: list[str], format: str) -> Tensor:
    """The packed rows of these tensors in common_format of theirs, one after the other."""
    parts = []
    for source in sources:
        rows = file.packed(source)
        if file.tensors[source].format != format:
            blocks = rows.view(len(rows), -1, get(_NARROW).block_bytes)
            ends = blocks[..., :_BEFORE], blocks[..., _BEFORE:]
            fifth = blocks.new_zeros(*blocks.shape[:2], _FIFTH)
            rows = torch.cat([ends[0], fifth, ends[1]], -1).view(len(rows), -1)
        parts.append(rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts)

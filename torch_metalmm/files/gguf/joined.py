"""Rows of several tensors of a file as one packed matrix: its format, its bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import DTYPES, get
from ...nn.packed import quantize_weight
from .file import GgufFile

# A block of q5_k is one of q4_k with the fifth bits of its codes, 32 bytes behind the first 16:
# without them its values are the same. llama.cpp's Q4_K_M has the two formats side by side in
# attn_qkv and attn_gate of Qwen3-Next, Q5_K_M q6_k and q5_k, Q3_K_M q4_k and q3_k.
_NARROW, _WIDE = "q4_k", "q5_k"
_BEFORE, _FIFTH = 16, 32
# The format of rows that are packed again: q8_0 adds the least to the rounding that was there,
# and its blocks of 32 divide what 256 does.
ANEW = "q8_0"


def common_format(formats: set[str]) -> str | None:
    """The format in which rows of these formats are one matrix: theirs, one of the same values, or
    ANEW. None: rows of an unpacked dtype are among others."""
    if len(formats) == 1:
        return next(iter(formats))
    if formats == {_NARROW, _WIDE}:
        return _WIDE
    return None if formats & DTYPES.keys() else ANEW


def joined_rows(file: GgufFile, sources: list[str], format: str) -> Tensor:
    """The packed rows of these tensors in common_format of theirs, one after the other."""
    parts = []
    for source in sources:
        rows, own = file.packed(source), file.tensors[source].format
        if own == format:
            parts.append(rows)
        elif format == _WIDE:
            blocks = rows.view(len(rows), -1, get(_NARROW).block_bytes)
            ends = blocks[..., :_BEFORE], blocks[..., _BEFORE:]
            fifth = blocks.new_zeros(*blocks.shape[:2], _FIFTH)
            parts.append(torch.cat([ends[0], fifth, ends[1]], -1).view(len(rows), -1))
        else:
            parts.append(quantize_weight(file.dense(source), format, name=source))
    return parts[0] if len(parts) == 1 else torch.cat(parts)

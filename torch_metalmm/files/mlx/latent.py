"""Keys and values of DeepSeek-V3's latent, which mlx-lm has as two stacks: embed_q, the keys turned
so that a query is multiplied in the latent's place, and unembed_out.

Groups of the turned one run along another axis than those of the model's matrix, so that the matrix
is decoded, to the dtype of the model, which is that of a dense format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import formats
from ...formats._bits import as_bytes
from ...models.skeleton import put_packed
from ...nn.place import place
from ..gguf.latent import joined
from ..source import Source
from .experts import rows_of
from .layout import Quantization

SPLIT = ("deepseek_v3", "glm4_moe_lite")  # types of models whose one matrix mlx-lm splits
MATRIX = "kv_b_proj"
_KEYS, _VALUES = "embed_q", "unembed_out"


def put_latents(
    model: Any, source: Source, quantization: Quantization | None, device: torch.device | str
) -> set[str]:
    """Give the model the matrices of its two stacks, which leave source.keys. Their names.

    ValueError: a stack is missing, or does not fit the model or the config.
    """
    done: set[str] = set()
    for name, attention in list(model.named_modules()):
        if f"{name}.{_KEYS}.weight" not in source.keys or not hasattr(attention, MATRIX):
            continue
        heads, rank = attention.num_heads, attention.kv_lora_rank
        nope, size = attention.qk_nope_head_dim, attention.v_head_dim
        stacks = []
        for leaf, shape in ((_KEYS, (heads, rank, nope)), (_VALUES, (heads, size, rank))):
            format, rows = rows_of(source, quantization, f"{name}.{leaf}", shape, "heads")
            decoded = torch.ops.metalmm.dequantize(rows, format, shape[2])
            stacks.append(decoded.float().view(shape).numpy())
        matrix = f"{name}.{MATRIX}.weight"
        value = torch.from_numpy(joined(*stacks)).to(model.dtype)
        put_packed(
            model, [matrix], place(as_bytes(value), device), formats.DTYPE_NAMES[value.dtype]
        )
        done.add(matrix)
    return done


def split(attention: Any, matrix: Tensor) -> dict[str, Tensor]:
    """{leaf: stack} of the attention's matrix, the inverse of joined."""
    both = matrix.view(attention.num_heads, -1, matrix.shape[-1])
    nope = attention.qk_nope_head_dim
    return {f"{_KEYS}.weight": both[:, :nope].transpose(1, 2), f"{_VALUES}.weight": both[:, nope:]}

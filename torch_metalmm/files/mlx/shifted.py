"""Norms of Qwen3-Next and Qwen3.5, of which checkpoints of mlx-lm have other numbers and shapes.

transformers multiplies by 1 + weight. mlx-lm's converter (sanitize in its models qwen3_next and
qwen3_5) stores the sum, and the taps of a convolution before its channels: [C, K, 1], not
[C, 1, K]. A convolution of another shape is one that the converter has not seen, nor the norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from ..headers import Found
from ..source import Source

SHIFTED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NORM = re.compile(
    r"(^|\.)((input|post_attention)_layernorm|[qk]_norm|model\.norm|[eh]norm)\.weight$"
)


def is_shifted(kind: str, headers: Iterable[Found]) -> bool:
    """Whether mlx-lm's converter made these tensors of a model of that type."""
    shapes = [found.shape for found in headers if found.key.endswith("conv1d.weight")]
    return kind in SHIFTED and all(shape[-1] == 1 for shape in shapes)


def has_sums(source: Source) -> bool:
    """Whether the head of the source has the sums; checkpoints of MLX have heads of both kinds.

    Means of norms of published heads are -0.5 to 0.8 as transformers has them (youssofal/MTPLX,
    issue 301), 0.5 on the average of six, so that 0.75 parts them. The last norm is no help: 1.3 to
    2.6, and 2.3 to 3.8. A wrong answer costs right drafts, never tokens.
    """
    norms = [n for n in source.keys if NORM.search(n) and n != "model.norm.weight"]
    means = [float(source.read(name).float().mean()) for name in norms]
    return sum(means) > 0.75 * len(means)


def unshifted(name: str, tensor: Tensor) -> Tensor:
    """The tensor as transformers has it, from mlx-lm's. The difference of 1 and a number of 16 bits
    is exact in f32 from 2^-13 on, in bf16 from 0.5 on."""
    if name.endswith("conv1d.weight") and tensor.dim() == 3:
        return tensor.transpose(1, 2)
    return tensor.float() - 1 if NORM.search(name) else tensor


def shifted(name: str, tensor: Tensor) -> Tensor:
    """The inverse, in the tensor's dtype, as mlx-lm's converter makes it."""
    if name.endswith("conv1d.weight"):
        return tensor.transpose(1, 2)
    return tensor + 1 if NORM.search(name) else tensor


def text_name(key: str) -> str | None:
    """The name in a model of text alone; None: the tensor is of a tower that sees."""
    if key.startswith(("vision_tower.", "model.visual.", "visual.")):
        return None
    return key.replace("model.language_model.", "model.", 1).removeprefix("language_model.")

"""The specification of every weight format, in plain torch: no native code.

formats.get("q4_k").quantize(w) packs W[N, K] into uint8 [N, row_bytes]; dequantize inverts it.
The native kernels are tested against these classes; the table is metal/formats.def.
"""

from __future__ import annotations

from difflib import get_close_matches

import torch

from . import blocks32, codebook, grids, kquants, microscaling, ternary
from ._base import DTYPE_NAMES, DTYPES, BlockFormat, Format
from .affine import AFFINE, Affine
from .dense import DENSE

# The classes that have a name, in the order in which their files define them.
_BLOCK: tuple[Format, ...] = tuple(
    kind()
    for file in (blocks32, kquants, codebook, microscaling, ternary, grids)
    for kind in vars(file).values()
    if isinstance(kind, type) and issubclass(kind, BlockFormat) and "name" in vars(kind)
)
_BY_NAME: dict[str, Format] = {f.name: f for f in (*DENSE, *_BLOCK, *AFFINE)}


def _check_fallbacks(all_formats: dict[str, Format]) -> None:
    """ValueError: a format of blocks of more than 32 values without another for other sizes."""
    for f in all_formats.values():
        other = all_formats.get(f.fallback or "")
        if f.block_values > 32 and (other is None or other.block_values >= f.block_values):
            raise ValueError(
                f"{f.name}: blocks of {f.block_values} values and fallback {f.fallback!r}; must be "
                "the name of a format of smaller blocks"
            )


_check_fallbacks(_BY_NAME)


def get(name: str) -> Format:
    """The format of that name, in any case. ValueError: none; it lists all, and those near it."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        most, _, size = name.lower().rpartition("_")
        if size in ("xs", "s", "m", "l", "xl") and most in _BY_NAME:
            raise ValueError(
                f"format: '{name}' is a mixture of llama.cpp's, which gives most tensors {most}; a "
                f"weight has one format: '{most}', or a pattern for each layer that differs"
            )
        near = get_close_matches(name.lower(), _BY_NAME)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"format: unknown '{name}'; allowed: {', '.join(_BY_NAME)}{hint}")
    return found


def affine(bits: int, group: int, dtype: torch.dtype) -> Affine:
    """The affine format of these sizes, dtype being that of its scales. ValueError if none."""
    for f in AFFINE:
        if (f.bits, f.block_values, f.dtype) == (bits, group, dtype):
            return f
    allowed = (sorted({getattr(f, a) for f in AFFINE}) for a in ("bits", "block_values"))
    raise ValueError(
        f"affine: {bits} bits in groups of {group} with {dtype} scales; allowed: bits {{}}, groups "
        "{}, scales of torch.float16, torch.bfloat16, torch.float32".format(
            *(", ".join(map(str, values)) for values in allowed)
        )
    )


def names() -> list[str]:
    """Every format name, in the order of metal/formats.def."""
    return list(_BY_NAME)


__all__ = ["DTYPES", "DTYPE_NAMES", "Affine", "Format", "affine", "get", "names"]

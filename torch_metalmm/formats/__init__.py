"""The specification of every weight format, in plain torch: no native code.

formats.get("q4_k").quantize(w) packs W[N, K] into uint8 [N, row_bytes]; dequantize inverts it.
The native kernels are tested against these classes; the table is metal/formats.def.
"""

from __future__ import annotations

from ._base import Format
from .affine import AFFINE, Affine
from .blocks32 import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from .codebook import IQ4_NL, IQ4_XS, MXFP4
from .dense import DENSE
from .kquants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K

_BLOCK = (
    *(Q4_0(), Q4_1(), Q5_0(), Q5_1(), Q8_0()),
    *(Q2_K(), Q3_K(), Q4_K(), Q5_K(), Q6_K()),
    *(IQ4_NL(), IQ4_XS(), MXFP4()),
)
_BY_NAME: dict[str, Format] = {f.name: f for f in (*DENSE, *_BLOCK, *AFFINE)}


def get(name: str) -> Format:
    """The format of that name, in any case. ValueError that lists the allowed names."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise ValueError(f"format: unknown '{name}'; allowed: {', '.join(_BY_NAME)}")
    return found


def names() -> list[str]:
    """Every format name, in the order of metal/formats.def."""
    return list(_BY_NAME)


__all__ = ["Affine", "Format", "get", "names"]

"""Weights, byte patterns and stored results for the tests of the formats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_metalmm import formats

AFFINE = [n for n in formats.names() if n.startswith("affine")]
GGML = [n for n in formats.names() if n not in AFFINE]
BLOCK = [n for n in GGML if n not in ("f32", "f16", "bf16")]
PACKED = [n for n in formats.names() if formats.get(n).packs]  # those that `quantize` makes
READ = [n for n in formats.names() if n not in PACKED]

# Formats for which gguf has a quantizer in Python.
GGUF_QUANTIZES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4", "tq1_0", "tq2_0")


def same_bits(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> bool:
    """f32 equality bit for bit; any NaN equals any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    equal = a.view(np.uint32) == b.view(np.uint32)
    return a.shape == b.shape and bool((equal | (np.isnan(a) & np.isnan(b))).all())


# Offsets of the f16 fields of a block; of iq1_m the two bytes whose top nibble is that of d.
HALF_FIELDS = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs", "q1_0", "q2_0"), (0,)),
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **dict.fromkeys(("mxfp4", "nvfp4", "mxfp8"), ()),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)},
    **{"tq1_0": (52,), "tq2_0": (64,), "iq1_m": (54,)},
}

_ONE, _FOUR, _EIGHT, _ZERO = b"\x00\x3c", b"\x00\x44", b"\x00\x48", b"\x00\x00"
_FP4 = (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
_NORMALS = [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)]
_E4M3 = [*_NORMALS, *(m / 512 for m in range(1, 8))]


def _words(first: int, step: int) -> dict[int, bytes]:
    """Eight words of a chunk, of scale 0: signs of no value, and of every value."""
    return {first + step * c: b"\xff\xff\xff\x0f" if c % 2 else b"\0" * 4 for c in range(8)}


def _signed(*sizes: int) -> tuple[int, ...]:
    return tuple(s * size for s in (-1, 1) for size in sizes)


# Fields {offset: bytes} with which a block decodes to its codes, and the codes of every byte.
UNIT_SCALE = {
    "q4_0": ({0: _ONE}, range(-8, 8)),
    "q4_1": ({0: _ONE, 2: _ZERO}, range(16)),
    "q5_0": ({0: _ONE}, range(-16, 16)),
    "q5_1": ({0: _ONE, 2: _ZERO}, range(32)),
    "q8_0": ({0: _ONE}, range(-128, 128)),
    "q2_k": ({0: b"\1" * 16, 80: _ONE, 82: _ZERO}, range(4)),
    "q3_k": ({96: b"\x11" * 8 + b"\xaa" * 4, 108: _ONE}, range(-4, 4)),
    "q4_k": ({0: _ONE, 2: _ZERO, 4: b"\1" * 4 + b"\0" * 4 + b"\1" * 4}, range(16)),
    "q5_k": ({0: _ONE, 2: _ZERO, 4: b"\1" * 4 + b"\0" * 4 + b"\1" * 4}, range(32)),
    "q6_k": ({192: b"\1" * 16, 208: _ONE}, range(-32, 32)),
    "iq4_nl": (
        {0: _ONE},
        (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    ),
    "iq4_xs": (
        {0: _ONE, 2: b"\xaa\xaa", 4: b"\x11" * 4},
        (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    ),
    "mxfp4": ({0: b"\x7f"}, _FP4),
    "nvfp4": ({0: b"\x38" * 4}, _FP4),
    "mxfp8": ({0: b"\x7f\x7f"}, (0, *_E4M3, *(-v for v in _E4M3))),
    "tq1_0": ({52: _ONE}, range(-1, 2)),
    "tq2_0": ({64: _ONE}, range(-1, 3)),
    "q1_0": ({0: _ONE}, (-1, 1)),
    "q2_0": ({0: _ONE}, range(-1, 3)),
    "iq1_s": ({0: _EIGHT, 34: b"\0" * 16}, (-7, 1, 9)),
    "iq1_m": ({32: b"\0" * 16, 48: b"\0\0\0\0\0\x80\0\x40"}, (-7, 1, 9)),
    "iq2_xxs": ({0: _EIGHT} | _words(6, 8), _signed(8, 25, 43)),
    "iq2_xs": ({0: _EIGHT, 66: b"\0" * 8}, _signed(8, 25, 43)),
    "iq2_s": ({0: _EIGHT, 74: b"\0" * 8}, _signed(8, 25, 43)),
    "iq3_xxs": ({0: _FOUR} | _words(66, 4), _signed(4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3_s": ({0: _ONE, 106: b"\0" * 4}, _signed(*range(1, 16, 2))),
}


def _weights(n: int, k: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(11)
    normal = torch.randn(n, k, generator=g)
    return {
        "normal": normal * 0.02,
        "zeros": torch.zeros(n, k),
        "constant": torch.full((n, k), -0.3),
        "constant groups": normal[:, ::32].repeat_interleave(32, 1) if k >= 32 else normal,
        "positive": normal.abs(),
        "negative": -normal.abs(),
        "sparse": normal * (torch.rand(n, k, generator=g) < 0.03) + 0.0,
        "ties": torch.randint(-6, 7, (n, k), generator=g) / 2,
        "huge": normal * 1e6,
        "tiny": normal * 1e-7,
        "vanishing": normal * 1e-30,
        "outliers": normal * torch.exp2(torch.randint(-12, 4, (n, k), generator=g).float()),
    }


KINDS = tuple(_weights(1, 32))


def weights(kind: str, n: int = 8, k: int = 1024) -> Tensor:
    """W f32 [n, k] of a kind that some quantizer could get wrong."""
    return _weights(n, k)[kind]


def golden_weights() -> Tensor:
    """f32 [1, 256], exact multiples of 1 / 64."""
    i = torch.arange(256)
    return (((i * i * 7 + i * 13) % 101 - 50) / 64)[None]


def digest_weights() -> Tensor:
    """f32 [16, 2048], bell-shaped, made of integers so that every machine has the same."""
    draws = np.random.RandomState(7).randint(-(2**20), 2**20, (4, 16, 2048))
    return torch.from_numpy(draws.sum(0).astype(np.float32)) * 2.0**-26


def digest_importance() -> Tensor:
    """f32 [2048] of unlike sizes, integers: every machine has the same."""
    draws = np.random.RandomState(11).randint(1, 256, 2048)
    return torch.from_numpy((draws**3).astype(np.float32))


# What ggml's C quantizers make (llama.cpp of August 2025, gcc, -ffp-contract=off; iq4_nl is its
# 15-trial quantize_iq4_nl; q1_0 and q2_0 are of ggml-base 0.25.3): first 16 digits of the sha256 of
# the first block of golden_weights, of digest_weights, and of those with digest_importance, by
# ggml_quantize_chunk of ggml-base 0.25.3, where it counts.
GGML_DIGEST = {
    "q4_0": ("62f53e3f72078d03", "a5336109aa74907d", "77794f7f8cd5e77a"),
    "q4_1": ("477007b9975ab8e5", "64853eec3663cab9", "939fa3994a8330bd"),
    "q5_0": ("c5e84d985fc28451", "7ffb601d1bf5a145", "d1c031b2e3f2a08b"),
    "q5_1": ("65d715c4672c3289", "28a4bac02e07885a", "7b6d9aec98f4fba5"),
    "q8_0": ("b949536b7daf7765", "82116766ac0d689a", ""),
    "q2_k": ("27aac953a8dcdebe", "b5206e4b925ebdda", "e1bc758dc867426e"),
    "q3_k": ("8af857968c6db6bd", "5de974d313a2a19b", "6e1e870f75ba2830"),
    "q4_k": ("f17eaae77447ee76", "d7976cb957159879", "dc748a61364ec625"),
    "q5_k": ("7d649d2ace9c6964", "158ef9a5b731a690", "217c442ec74b67a5"),
    "q6_k": ("a70cfcdf3053e212", "12b0e1aa5a90236f", "6f62b500df6eef59"),
    "iq4_nl": ("899a929fb49eda7e", "bbab85c271229c75", "907b78e52bf9ee22"),
    "iq4_xs": ("41a3575ab1481e77", "c84488fb6d297333", "9761173c435fafe3"),
    "mxfp4": ("db01caf952825de9", "7cc989369c549095", ""),
    "q1_0": ("5c8c099062648b8a", "cadc180caa6bac7d", ""),
    "q2_0": ("2e0086a9f242cb4c", "e10054f1475a5b56", ""),
}

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


# The first block of golden_weights, packed by ggml's C quantizers (llama.cpp of August 2025, gcc,
# -ffp-contract=off; iq4_nl is its 15-trial quantize_iq4_nl; q1_0 and q2_0 are of ggml-base 0.25.3)
# and, for affine, by mlx 0.32 (CPU).
GOLDEN = {
    "q4_0": "402ed043c9805a4664a5089c340df80646a8",
    "q4_1": "552e40bad033c9705a4664a5079c330df8064698",
    "q5_0": "402a149a8592a07691f0a49cc94a0f19670ae11c8c31",
    "q5_1": "212a40ba149a8592a07792f0a59cc95a0f29770af11d8d41",
    "q8_0": "4d1e81b40a8421e2c6cdf847b94f08e4e4084fb947f8cdc6e221840ab4817286be19",
    "q2_k": (
        "fdfecddccbbdfdfdefbcecbcef78efbc00895634d6396da522bf496b4eb1f972ff8d6f4eb1e961ee885a796c"
        "971c95666c971c956600e6154db50e9b69486e92ca431cfa88bfe21a932cfa88bed2068e3a28bf2a"
    ),
    "q3_k": (
        "62d823c65b04d41e27dd30b5f12efc977bfec317481a70db7ec712421d76fcd15c5ab024e13f92021c6ace8a"
        "943fafacde3afafc16e2b3a9348086fc4b180e65dd4b390ea515d52c8b784da700c51a71323fc589f9874ede"
        "dfc548bc8a4df03106868aa8680a66a800cc03f0c09f"
    ),
    "q4_k": (
        "a3165c22fdfdfcfcfefafafdff9cdfdd10b378607aa6f46507cca3add8269628ddb3bcd7157406ba808893d0"
        "3fb064291192460bf30d398808ab6048517dcb3bdd8269628dda3acc70564f6aa706873bd03fb06429112b68"
        "b637da9f8781bc0a7b1dd2b9b2dd2b9b1dd2a8a1cb0968fa6aa706873b01f903409e10b3886079a6f47407cc"
        "a3bcd8269628ecb3bcd71484"
    ),
    "q5_k": (
        "6a126c22fcfdfdfcfef9f9feff9dfcef609a21c45906d61c25cf32b3e32c7e959f1a67f3acfcd43f9a63f6a6"
        "f9d218b52067f2c0e54df9da008a575ba23d2d42bb676aa02af90d75100237b06f71c85433458c17f60b7320"
        "0157d09fa20aa676bb24d2d32ab575a800ad9fd45e0c2f76b06e71c8533357c07d6fb53f0e117905f62ba563"
        "65bc47273ba350528802d1f4c64f0e116803e418813f307702d1e55df9ea109a586bb24d2d52bb786ab03a09"
    ),
    "q6_k": (
        "50ad9321d89881134e120e144289f902847eb27e934158d8e0431d603d610f166b61f016d306d0341e8d8513"
        "39e82be74a209f982441e021e43118898d0239caa1dca200f6666ef01ade09de3c13828b7d493746c71ad0bf"
        "b8d411c0413441788a8d1239da05da19f26d6af901a4d1a01f4aead25248977bb77984252daea4f10c841a38"
        "ca3521a92db34467427de53ecfbc5b7d81d911ce786a485ca32ca4126c931ca52200e2060db10e8ba9486f92"
        "36bfe00674431fe66fd00674432efa728384798f8f7b8385808f907b8350837b678a"
    ),
    "iq4_nl": "2f1ee032d9704b3553b4079d230ef90636a9",
    "iq4_xs": (
        "8d0ac3f32ee00ffee032d9704b3553b4079d230ef90535a91f33482af985f0397f725414d23ea6ee2eed6ae3"
        "2d425537f7930f589ea28444e19a53509fe032d9704b3553b4079d23c0ef20a32ae1ccc8e6178b1fc7908dab"
        "82ed234a4d2eed6ae32d425537f7930f3b4776d83ce19a53509fe032d9704b35f57b00d9b2c0ef20a32ae1cc"
        "c8e6178b"
    ),
    "mxfp4": "7c6fde519fc3dbbd3cf915edf671fbdb21",
    "q1_0": "c535149a8592665eaf2fe8ebf5cc9242b350",
    "q2_0": "403a10558955625504425465581296449518",
    "affine2_g32": "245bdeaab7e51893403640ba00000000",
    "affine3_g32": "10d149b4cc8d9629ada070a8403240ba",
    "affine4_g32": "30096a54c8d468864d8c45a690030fa4402e40ba000000000000000000000000",
    "affine5_g32": "c0444059522f1f1d198bfae4a712a3201ae0039a402a40ba0000000000000000",
    "affine6_g32": "4043066a2651dffcd4a3a68df5337f9494a901d9007f00a1102640ba00000000",
    "affine8_g32": (
        "00369103a96648507ed13bd98e69698ed93bd17e504866a903913600ff0540a1f81d40ba0000000000000000"
        "00000000"
    ),
}

# First 16 digits of the sha256 of digest_weights, packed by the same C quantizers.
GGML_DIGEST = {
    "q4_0": "a5336109aa74907d",
    "q4_1": "64853eec3663cab9",
    "q5_0": "7ffb601d1bf5a145",
    "q5_1": "28a4bac02e07885a",
    "q8_0": "82116766ac0d689a",
    "q2_k": "b5206e4b925ebdda",
    "q3_k": "5de974d313a2a19b",
    "q4_k": "d7976cb957159879",
    "q5_k": "158ef9a5b731a690",
    "q6_k": "12b0e1aa5a90236f",
    "iq4_nl": "bbab85c271229c75",
    "iq4_xs": "c84488fb6d297333",
    "mxfp4": "7cc989369c549095",
    "q1_0": "cadc180caa6bac7d",
    "q2_0": "e10054f1475a5b56",
}


def digest_importance() -> Tensor:
    """f32 [2048] of unlike sizes, integers: every machine has the same."""
    draws = np.random.RandomState(11).randint(1, 256, 2048)
    return torch.from_numpy((draws**3).astype(np.float32))


# The same of digest_weights and digest_importance, by ggml_quantize_chunk of ggml-base 0.25.3.
GGML_WEIGHTED_DIGEST = {
    "q4_0": "77794f7f8cd5e77a",
    "q4_1": "939fa3994a8330bd",
    "q5_0": "d1c031b2e3f2a08b",
    "q5_1": "7b6d9aec98f4fba5",
    "q2_k": "e1bc758dc867426e",
    "q3_k": "6e1e870f75ba2830",
    "q4_k": "dc748a61364ec625",
    "q5_k": "217c442ec74b67a5",
    "q6_k": "6f62b500df6eef59",
    "iq4_nl": "907b78e52bf9ee22",
    "iq4_xs": "9761173c435fafe3",
}

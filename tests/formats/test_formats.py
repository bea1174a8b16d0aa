"""The specification of the formats against gguf, mlx and ggml's C results."""

from __future__ import annotations

import ast
import hashlib
import math

import gguf
import numpy as np
import pytest
import torch
from format_cases import (
    BLOCK,
    GGML,
    GGML_DIGEST,
    GGUF_QUANTIZES,
    HALF_FIELDS,
    KINDS,
    UNIT_SCALE,
    digest_importance,
    digest_weights,
    golden_weights,
    same_bits,
    weights,
)
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from places import ROOT
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.formats import _base, _search

pytestmark = pytest.mark.covering


def ggml_type(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.upper()]


# Those that the installed gguf decodes; it names more.
IN_GGUF = [n for n in GGML if n.upper() in vars(gguf.quants) or n in ("f32", "f16", "bf16")]


# ---- names


def test_names_are_accepted_in_any_case_and_unknown_ones_listed():
    assert formats.get("Q4_K") is formats.get("q4_k")
    assert formats.get("AFFINE4_G64_BF16").name == "affine4_g64_bf16"
    with pytest.raises(ValueError, match="unknown 'q4_9'; allowed: f32, f16, .*affine8_g128_f32"):
        formats.get("q4_9")


def test_the_specification_imports_only_torch():
    allowed = ("__future__", "abc", "collections.abc", "difflib", "torch")
    for file in (ROOT / "torch_metalmm" / "formats").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert [a.name for a in node.names] == ["torch"], file
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module in allowed, file


# ---- decoding


def random_bytes(name: str, finite: bool, n: int = 16) -> Tensor:
    """Random rows of 2048 values; with finite scales or with any bytes."""
    f = formats.get(name)
    shape = (n, f.row_bytes(2048))
    data = np.random.RandomState(5).randint(0, 256, shape).astype(np.uint8)
    if finite:
        blocks = data.reshape(-1, f.block_bytes)
        for offset in HALF_FIELDS.get(name, ()):
            blocks[:, offset + 1] &= 0xBF  # exponent below 16
    return torch.from_numpy(data)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", IN_GGUF)
def test_dequantize_equals_gguf(name, finite):
    packed = random_bytes(name, finite)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(packed.numpy(), ggml_type(name))
    got = formats.get(name).dequantize(packed, 2048)
    assert got.dtype == torch.float32
    assert same_bits(got, expected)
    if finite and name in BLOCK:
        assert name == "mxfp4" or bool(got.isfinite().all())


@pytest.mark.parametrize("name", BLOCK)
def test_every_byte_decodes_to_the_codes_of_the_format(name):
    f = formats.get(name)
    fields, codes = UNIT_SCALE[name]
    column = torch.arange(f.block_bytes)
    values = torch.arange(256)[:, None] * (2 * column + 1) + column  # column j: every byte once
    blocks = (values % 256).to(torch.uint8)
    for offset, value in fields.items():
        blocks[:, offset : offset + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
    got = f.dequantize(blocks, f.block_values)
    assert sorted(set(got.flatten().tolist())) == sorted(codes)
    if name in IN_GGUF:
        assert same_bits(got, gguf.dequantize(blocks.numpy(), ggml_type(name)))


def test_codes_of_one_and_two_bits_are_those_of_their_values():
    """Of blocks whose bytes are ggml's (GGML_DIGEST): gguf decodes neither."""
    x = golden_weights()[:, :128]
    d = x.abs().sum() / 128  # exact, in any order
    signs, two = (formats.get(n) for n in ("q1_0", "q2_0"))
    wanted = torch.where(x >= 0, d, -d).half().float()
    assert torch.equal(signs.dequantize(signs.quantize(x), 128), wanted)
    top = x.view(2, 64).abs().amax(1, keepdim=True)
    ternary = (x.view(2, 64) / top).sign() * ((x.view(2, 64) / top).abs() >= 0.5)
    assert torch.equal(
        two.dequantize(two.quantize(x), 128), (ternary * top.half().float()).view(1, 128)
    )


# ---- quantizing


@pytest.mark.quick
@pytest.mark.parametrize("name", [n for n in GGML if n in GGML_DIGEST or formats.get(n).weighs])
def test_quantize_gives_the_bytes_of_ggml(name):
    f = formats.get(name)
    made = [f.quantize(golden_weights()[:, : f.block_values]), f.quantize(digest_weights())]
    if f.weighs:
        made.append(f.quantize(digest_weights(), digest_importance()))
    found = [hashlib.sha256(packed.numpy().tobytes()).hexdigest()[:16] for packed in made]
    assert found == [digest for digest in GGML_DIGEST[name] if digest]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GGUF_QUANTIZES)
def test_quantize_equals_gguf(name, kind):
    w = weights(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(w.numpy(), ggml_type(name))
    assert np.array_equal(formats.get(name).quantize(w).numpy(), expected)


# Below 1e-30 a scale may have an infinite reciprocal, above 1e37 max - min overflows: gguf then
# converts NaN and Inf to integers, whose result is the processor's.
finite_floats = st.one_of(
    st.just(0.0),
    st.integers(-8, 8).map(float),
    st.floats(2.0**-99, 2.0**122, width=32),
    st.floats(-(2.0**122), -(2.0**-99), width=32),
)


@settings(max_examples=60)
@given(w=hnp.arrays(np.float32, (2, 32), elements=finite_floats))
@pytest.mark.parametrize("name", GGUF_QUANTIZES)
def test_quantize_equals_gguf_on_found_cases(name, w):
    w = np.tile(w, (1, formats.get(name).block_values // 32))
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(w, ggml_type(name))
    assert np.array_equal(formats.get(name).quantize(torch.from_numpy(w)).numpy(), expected)


def test_mxfp4_exponent_rounds_log2_as_ggml_near_powers_of_two():
    n = np.arange(-120, 129)[:, None]
    top = 2.0**n * (1 - np.arange(0, 60) * 2.0**-24)
    top = top[top < 2.0**128].astype(np.float32)
    expected = np.floor(np.log2(top.astype(np.float64)).astype(np.float32)) + 125
    w = torch.zeros(len(top), 32)
    w[:, 3] = torch.from_numpy(-top)
    got = formats.get("mxfp4").quantize(w)[:, 0].numpy()
    assert np.array_equal(got, expected.clip(0, 254))


# ---- every format: edges and errors


@pytest.mark.parametrize("name", ["f16", "q4_0", "q4_k", "q6_k", "iq4_xs", "affine5_g64"])
def test_rows_do_not_depend_on_the_chunk_they_are_in(name, monkeypatch):
    f = formats.get(name)
    w = weights("outliers", 7, 512)
    packed = f.quantize(w)
    monkeypatch.setattr(_base, "VALUES_AT_A_TIME", 1024)
    assert torch.equal(f.quantize(w), packed)
    whole = f.dequantize(packed, 512)
    assert same_bits(f.dequantize(packed[3:], 512), whole[3:])
    assert f.quantize(w[:0]).shape == (0, f.row_bytes(512))
    assert f.dequantize(packed[:0], 512).shape == (0, 512)
    assert f.quantize(w[:, :0]).shape == f.dequantize(packed[:, :0], 0).shape == (7, 0)


def test_wrong_arguments_are_named():
    q4_k = formats.get("q4_k")
    with pytest.raises(ValueError, match="q4_k: K = 96 is not a multiple of the block of 256"):
        q4_k.quantize(torch.zeros(2, 96))
    with pytest.raises(ValueError, match="affine4_g64: K = 96 .* block of 64 values"):
        formats.get("affine4_g64").row_bytes(96)
    with pytest.raises(ValueError, match=r"w must be \[N, K\], got shape \[256\]"):
        q4_k.quantize(torch.zeros(256))
    with pytest.raises(ValueError, match="float32, float16 or bfloat16, got torch.int32"):
        q4_k.quantize(torch.zeros(1, 256, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"uint8 \[N, 144\] for K = 256, got torch.uint8 \[2, 1"):
        q4_k.dequantize(torch.zeros(2, 145, dtype=torch.uint8), 256)


# ---- the arithmetic rules


def test_sums_divisions_and_roots_have_one_rounding_per_operation():
    x = weights("outliers", 32, 4096)
    total = np.zeros(4096, np.float32)
    for row in x.numpy():
        total = total + row
    assert same_bits(_search.ordered_sum(x), total)
    assert same_bits(_search.divide(63, x), np.float32(63) / x.numpy())
    assert same_bits(_search.square_root(x.abs()), np.sqrt(x.abs().numpy()))
    assert same_bits(x / 63, x.numpy() / np.float32(63))
    v = torch.tensor([math.nan, math.inf, -math.inf, 0.5, 1.5, -2.5, 1e30])
    assert _search.to_code(v, -8, 7).tolist() == [-8, 7, -8, 0, 2, -2, 7]

"""Blocks of 2-byte fields, which the shaders read 2, 4 or 8 bytes at a time where rows allow it.

The memory of every case ends with the last row of W, and begins with the first where the case has
no offset: the emulator reports a read that reaches outside.
"""

from __future__ import annotations

import pytest
import torch
from backends import compiled_dtype
from inputs import activations, random_weight
from oracle import DTYPES, FORMATS, check, spec
from plan_cases import STRATEGIES, WIDTH_BITS
from shaders import alignment_of, execute, memory_of
from test_shader_gemm import expected
from torch import Tensor

from torch_metalmm import _C, formats

pytestmark = pytest.mark.shaders

BLOCKS = [f for f in map(formats.get, FORMATS) if f.block_values > 1]
HALVES = [f.name for f in BLOCKS if f.row_bytes(f.block_values) % 4 == 2]
KERNELS = (
    *(name for name in STRATEGIES if name.startswith("gem") and name != "gemv_coalesced"),
    "dequantize",
)
PLACES = ((0, 0), (0, 2), (2, 0), (2, 2), (4, 0), (0, 4), (4, 4), (6, 2), (8, 8))


def width_of(*bytes_: int) -> int:
    """The largest width of which all are multiples."""
    return max(width for width in WIDTH_BITS if not any(b % width for b in bytes_))


def run(kernel: str, name: str, packed: Tensor, x: Tensor, offset: int, gap: int) -> Tensor:
    """The result of a kernel on rows `gap` bytes apart, behind `offset` bytes."""
    (m, k), (n, row) = x.shape, packed.shape
    op = "dequantize" if kernel == "dequantize" else "linear"
    # Vector kernels read 8 bytes at a time on NVIDIA GPUs alone.
    problem = {"m": m, "n": n, "k": k, "format": name, "strategy": kernel, "w_stride": row + gap}
    problem["chip"] = _C.CUDA
    weight = memory_of(packed, gap, offset)
    plan = _C.plan(op, w_alignment=alignment_of(weight), **problem)
    width = width_of(row, offset, row + gap if n > 1 else 0)
    bounds = plan["passes"][0]["constants"]["bounds"]
    assert bounds & WIDTH_BITS[8] == WIDTH_BITS[width], (offset, gap)
    y = torch.full((n, k) if op == "dequantize" else (m, n), torch.nan, dtype=x.dtype)
    buffers: dict[str, Tensor | None] = {"weight": weight, "y": y}
    return execute(op, buffers | {"x": x.reshape(-1), "bias": None, "c": None}, **problem)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", HALVES)
def test_every_width_gives_the_same_bits(name: str, kernel: str) -> None:
    """Few and many blocks a row, rows at every distance: as where the width is 2 bytes."""
    block, widths = formats.get(name).block_values, set()
    many = 4 if block == 256 else 8
    for i, blocks in enumerate((2, 3, many)):  # whose rows are multiples of 4, 2 and 8 bytes
        packed, dtype = random_weight(name, 3, blocks * block), DTYPES[(i + 1) % 3]
        if kernel != "dequantize":
            dtype = compiled_dtype(name, kernel)
        x = activations(5, blocks * block, dtype=dtype)
        want = run(kernel, name, packed, x, 2, packed.shape[1] % 4)  # rows at odd multiples of 2
        w = spec(name, packed, blocks * block)
        if kernel == "dequantize":
            assert torch.equal(want, w.to(dtype))
        else:
            check(want, expected(kernel, x, w).store(dtype), f"{name} {kernel} {blocks}")
        for offset, gap in PLACES[i % 3 :: 3] if blocks % 4 else PLACES:
            widths.add(width_of(packed.shape[1], offset, packed.shape[1] + gap))
            y = run(kernel, name, packed, x, offset, gap)
            assert torch.equal(y, want), (blocks, offset, gap)
    assert widths == set(WIDTH_BITS)


@pytest.mark.parametrize("kernel", ["gemm_small"])  # of which the test above has the formats
@pytest.mark.parametrize("name", HALVES)
def test_one_row(name: str, kernel: str) -> None:
    """A single row needs no stride that is a multiple of the width."""
    k = 4 * formats.get(name).block_values
    packed, x = random_weight(name, 1, k), activations(2, k, dtype=compiled_dtype(name, kernel))
    want = run(kernel, name, packed, x, 2, 0)
    assert torch.equal(run(kernel, name, packed, x, 0, 2), want)


@pytest.mark.parametrize("name", HALVES)
def test_embedding(name: str) -> None:
    """Rows by id, the last one among them."""
    k = 4 * formats.get(name).block_values
    packed, ids = random_weight(name, 5, k), torch.tensor([4, 0, 3])
    y = torch.full((3, k), torch.nan, dtype=torch.float16)
    buffers: dict[str, Tensor | None] = {"ids": ids, "weight": memory_of(packed), "y": y}
    execute("embedding", buffers, m=3, n=5, k=k, format=name)
    assert torch.equal(y, spec(name, packed, k)[ids].half())


@pytest.mark.parametrize("name", ("q4_0", "q8_0"))
def test_products_of_halves_round_once(name: str) -> None:
    """f16 results of f16 scales of every exponent: the bits of the f32 product, rounded to f16.

    Infinite products, subnormal ones and zeros of both signs among them.
    """
    exponents = torch.arange(31).repeat_interleave(4) << 10
    scales = exponents + torch.tensor([0, 1, 0x2AB, 0x3FF]).repeat(31)
    scales = torch.cat([scales, scales | 0x8000]).to(torch.int32).to(torch.uint16)
    k = 32 * len(scales)
    packed = random_weight(name, 1, k)
    blocks = packed.view(len(scales), -1)
    blocks[:, :2] = scales.view(torch.uint8).view(-1, 2)
    blocks[:, 2] = 8 | 8 << 4 if name == "q4_0" else 0  # a zero
    y = run("dequantize", name, packed, torch.zeros(1, k, dtype=torch.float16), 0, 0)
    want = spec(name, packed, k).half()
    assert want.isinf().any() and (want == 0).any()
    assert torch.equal(y.view(torch.int16), want.view(torch.int16))

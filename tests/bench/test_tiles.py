"""`python -m bench tiles`: the counter on a tile counted by hand and on the text of another
project, the committed figures."""

from __future__ import annotations

import pytest
from places import ROOT, TESTS, mlx_include

from bench.shaders import cells, foreign, ptx, tiles

# A turn: 2 loads of matrices, one across rows, which is two; a load from device memory, its store;
# 2 barriers; 3 products.
KERNEL = """
extern "C" void by_hand(threadgroup half* memory, device const half* x, device float* y, uint n) {
  simdgroup_float8x8 sums[3];
  simdgroup_half8x8 a, b;
  for (int i = 0; i < 3; ++i) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint i = 0; i < n; ++i) {
    memory[64] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(a, memory, 8);
    simdgroup_load(b, memory, 8, ulong2(0, 0), true);
    for (int j = 0; j < 3; ++j) simdgroup_multiply_accumulate(sums[j], a, b, sums[j]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < 3; ++i) simdgroup_store(sums[i], y + 64 * i, 8);
}
"""
COUNTED = {
    "product": 3,
    "load from threadgroup": 3,
    "load from device": 1,
    "store to threadgroup": 1,
    "barrier": 2,
}


def test_a_tile_counted_by_hand() -> None:
    text = cells.compile_text(foreign.HEAD + "using namespace metal;" + KERNEL)
    found = tiles.cost(ptx.functions(text)["by_hand"])
    assert {kind: found.counts[kind] for kind in COUNTED} == COUNTED
    tile = tiles.Tile("f16", "f16", "by hand", found)
    assert tile.products == 3
    assert tile.of("products") == 16
    assert tile.cycles * 3 == sum(round(3 * tile.of(kind)) for kind in tiles.KINDS)


def test_the_text_of_another_project() -> None:
    """A turn of this kernel takes 32 of K: 2 products and 3 loads for each 8 of them."""
    file = TESTS / "msl" / "packed.metal"
    (function,) = foreign.functions(foreign.ggml(file), ["kernel_mul_mm_q4_0_f32"]).values()
    found = tiles.cost(function).counts
    assert (found["product"], found["load from threadgroup"]) == (8, 12)
    assert (found["store to threadgroup"], found["barrier"]) == (16 + 8, 2)
    assert found["load from device"] > 0


def test_the_tiles_of_mlx() -> None:
    """A simdgroup multiplies 2 x 2 matrices for each 8 of 32 values of K."""
    found = list(tiles.of_mlx(mlx_include()))
    assert [(t.format, t.dtype, t.products) for t in found] == [
        ("affine4", dtype, 2 * 2 * 4) for dtype in tiles.DTYPES
    ]


def test_a_loop_without_products() -> None:
    text = cells.compile_text(
        "#include <metal_stdlib>\n"
        'extern "C" void f(device float* y, uint n) { for (uint i = 0; i < n; ++i) y[i] += 1.0f; }'
    )
    with pytest.raises(ValueError, match="multiplies matrices"):
        tiles.cost(ptx.functions(text)["f"])


def test_the_page_has_our_tiles() -> None:
    """The largest and the smallest tile of every format, as this compiler counts them."""
    results = (ROOT / "bench" / "results.md").read_text("utf-8")
    page = results.partition("## Matrix tiles")[2]
    for strategy, column in ((tiles.OURS[0], 1), (tiles.OURS[-1], 4)):
        for tile in tiles.own(strategy, "f16"):
            row = page.partition(f"\n| {tile.format} |")[2].splitlines()[0].split(" | ")
            assert row[column - 1].strip() == f"{tile.cycles:.2f}", tile.format

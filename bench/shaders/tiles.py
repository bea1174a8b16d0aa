"""`python -m bench tiles`: what loops of matrix kernels cost an Apple GPU, per product of 8 x 8.

The loop along K is counted as that of gemv (cells.py, ptx.py), per lane and product of matrices:
our tiles from the text of metal/, those of ggml and MLX from the text of their files (foreign.py),
by the same compiler and the same table of costs. To that table are added: a product, which takes 16
cycles (512 multiply-adds of 32 lanes at the rate of the vector units), and loads, stores and
barriers, one cycle each, to issue. What waits for memory or for another simdgroup is not in the
count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..tables import Table, to_markdown
from . import cells, foreign, ptx

PRODUCT_CYCLES = 16
_PRODUCT = "simdgroup_product"  # a function of counted_matrix.h
OWN_RULES: ptx.Rules = (
    (rf"{_PRODUCT}\.\S+ .*", "product", PRODUCT_CYCLES),
    (r"ld\.shared\.\S+ .*", "load from threadgroup", 1),
    (r"ld\.\S+ .*", "load from device", 1),
    (r"st\.shared\.\S+ .*", "store to threadgroup", 1),
    (r"bar\.sync .*", "barrier", 1),
    (r"bar\.warp\.sync .*", ptx.FREE, 0),  # simdgroup_barrier: no instruction there
)
RULES: ptx.Rules = OWN_RULES + ptx.RULES
# Columns of the table, and the classes of ptx.py in each.
KINDS: dict[str, tuple[str, ...]] = {
    "products": ("product",),
    "decode": ("bitwise", "shift", "convert", "fma", "special", "select"),
    "loads, device": ("load from device",),
    "loads, threadgroup": ("load from threadgroup",),
    "stores": ("store to threadgroup",),
    "barriers": ("barrier",),
    "addresses, loop": ("integer", "branch"),
}

DTYPES = ("f16", "bf16", "f32")
# Codecs by their name in formats.def: name of ggml's kernel; group and bits of affine_qmm_t.
FORMATS: dict[str, tuple[str | None, str | None]] = {
    "q4_0": ("q4_0", None),
    "q4_k": ("q4_K", None),
    "q6_k": ("q6_K", None),
    "q8_0": ("q8_0", None),
    "f16": ("f16", None),
    "affine4": (None, "64, 4"),
}
# C++ names of the dtypes of x.
MLX_TYPES = {"f16": "half", "bf16": "bfloat16_t", "f32": "float"}
GGML_X = ("f16", "f32")  # ggml's kernels round an x of f32 to half, as they load it


@dataclass(frozen=True)
class Strategy:
    """A tile of ours: header, kernel struct, rows of x of a threadgroup; what it takes for x."""

    name: str
    struct: str
    rows: int
    x: str = "x"


OURS = (
    *(Strategy("gemm", "Gemm", rows) for rows in (64, 32, 16)),
    Strategy("gemm_small", "GemmSmall", 8, "x, x"),
)


@dataclass(frozen=True)
class Tile:
    """A loop: whose, of which format and dtype of x; cycles per product of matrices, by class."""

    format: str
    dtype: str
    name: str
    cost: ptx.Cost

    @property
    def products(self) -> int:
        return self.cost.counts["product"]

    @property
    def cycles(self) -> float:
        """Per product, all classes."""
        return self.cost.cycles / self.products

    def of(self, kind: str) -> float:
        """Per product, of a column of KINDS."""
        return sum(self.cost.by_class[c] for c in KINDS[kind]) / self.products


def cost(function: str) -> ptx.Cost:
    """The cheapest loop with products: of several, that of the tiles that nothing cuts off.

    ValueError: no loop has products.
    """
    constants = ptx.constant_halves(function)
    loops = ptx.inner_loops(ptx.blocks(function))
    multiplying = [x for x in loops if any(i.opcode.startswith(_PRODUCT) for i in x)]
    found = [ptx.cost(loop, constants, RULES) for loop in multiplying]
    if not found:
        raise ValueError("a function without a loop that multiplies matrices")
    return min(found, key=lambda c: c.cycles / c.counts["product"])


def own(strategy: Strategy, dtype: str) -> Iterator[Tile]:
    """The loops of a tile of ours for every format of FORMATS."""
    kernel = (
        f'{foreign.HEAD}#include "kernels/{strategy.name}.h"\n#include "formats/all.h"\n'
        '#define MM_COUNTED(name, Struct) extern "C" void counted_##name( \\\n'
        f"    device const {cells.DTYPES[dtype]}* x, device const uchar* w, \\\n"
        f"    device {cells.DTYPES[dtype]}* y, constant metalmm::KernelArgs& args, \\\n"
        "    threadgroup float4* memory, metalmm::Position at) { \\\n"
        f"  metalmm::{strategy.struct}<metalmm::Struct, {cells.DTYPES[dtype]}>::run( \\\n"
        f"      {strategy.x}, w, {{y, y, y}}, args, memory, at); \\\n"
        "}\n"
        "#define MM_FORMAT(name, Struct) MM_COUNTED(name, Struct)\n"
        '#include "formats/each.h"\n'
    )
    found = ptx.functions(cells.compile_text(kernel, Batch=strategy.rows))
    for name in FORMATS:
        title = f"{strategy.name}, {strategy.rows} rows of x"
        yield Tile(name, dtype, title, cost(found[f"counted_{name}"]))


def of_ggml(file: Path) -> Iterator[Tile]:
    names = {
        f"kernel_mul_mm_{ggml}_{dtype}": (name, dtype)
        for name, (ggml, _) in FORMATS.items()
        for dtype in GGML_X
        if ggml
    }
    for kernel, function in foreign.functions(foreign.ggml(file), list(names)).items():
        name, dtype = names[kernel]
        yield Tile(name, dtype, "ggml kernel_mul_mm", cost(function))


def of_mlx(folder: Path) -> Iterator[Tile]:
    arguments = {
        f"{type_}, {group_and_bits}, true, false": (name, dtype)
        for name, (_, group_and_bits) in FORMATS.items()
        for dtype, type_ in MLX_TYPES.items()
        if group_and_bits
    }
    text = foreign.mlx(folder, [f"affine_qmm_t<{a}>" for a in arguments])
    kernels = [f"mlx_{i}" for i in range(len(arguments))]
    found = foreign.functions(text, kernels)
    for (name, dtype), kernel in zip(arguments.values(), kernels, strict=True):
        yield Tile(name, dtype, "MLX affine_qmm_t", cost(found[kernel]))


def own_tiles() -> list[Tile]:
    return [tile for s in OURS for dtype in DTYPES for tile in own(s, dtype)]


def row(tile: Tile, best: Tile | None) -> list[str]:
    """A row of the table; the last cell is the ratio to the best peer."""
    cells_ = [f"{tile.of(kind):.2f}" for kind in KINDS]
    ratio = f"{tile.cycles / best.cycles:.2f}" if best else "–"
    return [f"{tile.format}, x {tile.dtype}", tile.name, *cells_, f"{tile.cycles:.2f}", ratio]


def table(ours: Iterable[Tile], peers: Iterable[Tile]) -> Table:
    """A row for each tile, formats and dtypes of x together; with peers, those that a peer has."""
    ours, peers = list(ours), list(peers)
    columns = ["W, x", "tile", *KINDS, "sum", "of the best peer's"]
    out = Table("Issue cycles per product of 8 × 8 matrices", columns)
    for name in FORMATS:
        for dtype in DTYPES:
            of_peers = [t for t in peers if (t.format, t.dtype) == (name, dtype)]
            best = min(of_peers, key=lambda t: t.cycles, default=None)
            if peers and not best:
                continue
            of_ours = [t for t in ours if (t.format, t.dtype) == (name, dtype)]
            out.rows += [row(t, best) for t in (*of_ours, *of_peers)]
    return out


def markdown(ggml: Path | None, mlx: Path | None) -> str:
    """The table; a peer whose text is not given is left out.

    ValueError: a text that is not that peer's. OSError: no such file. BuildError: the compiler's.
    """
    peers = [*(of_ggml(ggml) if ggml else ()), *(of_mlx(mlx) if mlx else ())]  # may be refused
    return to_markdown(table(own_tiles(), peers))


def print_(args: argparse.Namespace) -> None:
    print(markdown(args.ggml, args.mlx))

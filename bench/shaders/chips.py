"""`python -m bench chips`: what the chip model predicts of products, and with --tokens of whole
tokens on Macs, beside what others have published.

No figure here was measured by this project: torch_metalmm.tools.cost_model and token_time make the
predictions, and the published ones are their authors'.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression

from torch_metalmm import _C
from torch_metalmm.msl.build import ROOT
from torch_metalmm.tools.cost_model import Chip, predict
from torch_metalmm.tools.token_time import CONTEXT, FORMS, MODELS, OP_US, token_time

from ..models.quality import caches_named
from ..problem import parse_ints
from ..tables import Table, digits, percent, to_markdown

PAGE = ROOT / "docs" / "chip-model.md"
CHIPS = tuple(str(gpu["name"]) for gpu in _C.gpus())
ROWS_FORMATS, ROWS_SHAPE = ("q4_0", "q4_k", "q6_k", "q8_0", "affine4_g64"), (14336, 4096)

DISCUSSION, MLX_LM = "llama.cpp discussion 4167", "mlx-lm BENCHMARKS.md"


@dataclass(frozen=True)
class Tokens:
    """Decoding at batch 1 as someone published it: tokens per second."""

    chip: str
    model: str
    format: str
    program: str
    rate: float
    source: str
    context: int = CONTEXT  # tokens before, where they are stated
    cores: int | None = None  # where the chip has fewer than the largest of its name


@dataclass(frozen=True)
class Kernel:
    """Time of one product y[M, N] = x[M, K] W[N, K]ᵀ as someone published it."""

    chip: str
    m: int
    n: int
    k: int
    format: str
    us: float
    source: str
    remark: str = ""


def _rates(
    chip: str,
    cores: int | None,
    source: str = DISCUSSION,
    model: str = "Llama 2 7B",
    **rates: float,
) -> list[Tokens]:
    program = "mlx-lm" if source == MLX_LM else "llama.cpp"
    return [
        Tokens(chip, model, format, program, rate, source, cores=cores)
        for format, rate in rates.items()
    ]


# The whole token: more than its products. The discussion: llama-bench, 128 tokens, commit 8e672ef
# of November 2023. mlx-lm: after a prompt of 2048 tokens; groups of 64, its default.
TOKENS = (
    *_rates("m1", None, q8_0=7.91, q4_0=14.15),
    *_rates("m2", None, f16=6.72, q8_0=12.21, q4_0=21.91),
    *_rates("m4", None, f16=7.43, q8_0=13.54, q4_0=24.11),
    *_rates("m3-pro", None, f16=9.89, q8_0=17.53, q4_0=30.74),
    *_rates("m1-pro", 14, f16=12.75, q8_0=21.95, q4_0=35.52),
    *_rates("m2-pro", 16, f16=12.47, q8_0=22.70, q4_0=37.87),
    *_rates("m4-pro", None, f16=17.18, q8_0=30.69, q4_0=50.74),
    *_rates("m2-max", 30, f16=24.16, q8_0=39.97, q4_0=60.99),
    *_rates("m4-max", None, f16=31.64, q8_0=54.05, q4_0=83.06),
    *_rates("m2-ultra", None, f16=41.02, q8_0=66.64, q4_0=94.27),
    *_rates("m2-ultra", None, f"{DISCUSSION}, November 2024", q4_0=108.8),
    *_rates("m5", None, "llama.cpp pull request 16634", "Mistral 7B", q4_0=26.59),
    *_rates(
        *("m4-max", None, MLX_LM, "Qwen3 4B"),
        bf16=52.47,
        affine8_g64=86.9,
        affine6_g64=104.7,
        affine5_g64=116.4,
        affine4_g64=134.5,
    ),
)

_MLX, _TILE = "MLX issue 3852", "MLX pull request 3863"
_LLAMA = "llama.cpp pull request 27776"
KERNELS = (
    Kernel("m4-pro", 1, 17408, 5120, "affine4_g128", 198, _MLX),
    Kernel("m4-pro", 1, 248320, 5120, "affine4_g128", 2725, _MLX),
    Kernel("m4-pro", 1, 17408, 5120, "affine2_g128", 121, _MLX),
    Kernel("m4-pro", 1, 248320, 5120, "affine2_g128", 1539, _MLX),
    Kernel("m3-max", 1, 17408, 5120, "affine4_g128", 126, _MLX, "cold"),
    Kernel("m3-max", 1, 17408, 5120, "affine2_g128", 72, _MLX, "cold"),
    Kernel("m3-pro", 1, 17408, 5120, "q4_k", 405, _LLAMA),
    Kernel("m3-pro", 1, 5120, 6144, "q4_k", 134.29, _LLAMA),
    Kernel("m3-pro", 1, 48, 5120, "q4_k", 4.92, _LLAMA, "W in cache"),
    Kernel("m3-max", 4, 17408, 5120, "affine4_g128", 165, _TILE, "group size not stated"),
    Kernel("m3-max", 8, 17408, 5120, "affine4_g128", 323, _TILE, "group size not stated"),
    Kernel("m3-max", 16, 17408, 5120, "affine4_g128", 306, _TILE, "group size not stated"),
    Kernel("m3-max", 32, 17408, 5120, "affine4_g128", 513, _TILE, "group size not stated"),
    Kernel("m3-max", 33, 17408, 5120, "affine4_g128", 1002, _TILE, "group size not stated"),
)


def machine(chip: str, cores: int | None = None) -> Chip:
    """A chip of the table, or its configuration with fewer cores."""
    found = Chip.named(chip)
    return replace(found, cores=cores) if cores else found


def token_bytes(format: str, chip: Chip, model: str) -> float:
    """The bytes that the products of a token move."""
    products = MODELS[model].products(fused=False)
    return sum(times * predict(1, n, k, format, chip).moved_bytes for n, k, times in products)


def rows_table() -> Table:
    """The time of a step of drafts: by the vector kernel, whose rows have the bits of single
    ones, and behind it 8 rows by the kernel that plan() chooses."""
    title = "Predicted time of 2 / 4 / 8 rows of x over that of one, with the bits of single rows; "
    title += "in brackets 8 rows by the fastest kernel; W {}×{}, x f16".format(*ROWS_SHAPE)
    table = Table(title, ["chip", *ROWS_FORMATS])
    for chip in CHIPS:
        row = [chip]
        for format in ROWS_FORMATS:
            given = (*ROWS_SHAPE, format, chip)
            one = predict(1, *given).total
            exact = (predict(m, *given, strategy="gemv_batched").total / one for m in (2, 4, 8))
            fastest = predict(8, *given).total / one
            row.append(" / ".join(f"{r:.2f}" for r in exact) + f" ({fastest:.2f})")
        table.rows.append(row)
    return table.joined()


def fits() -> Table:
    """A fit for each chip over its formats: ms of a token = bytes / bandwidth + a constant."""
    columns = ["chip, cores", "model", "GB/s", "of nominal", "ms beside it"]
    title = "Decoding, as others published it: ms of a token against its bytes, least squares"
    table = Table(title, columns)
    groups: dict[tuple[str, int | None, str, str], list[Tokens]] = {}
    for t in TOKENS:
        groups.setdefault((t.chip, t.cores, t.model, t.source), []).append(t)
    for (name, cores, model, _), found in groups.items():
        if len(found) == 1:
            continue
        chip = machine(name, cores)
        sizes = [token_bytes(t.format, chip, model) for t in found]
        slope, constant = linear_regression(sizes, [1e3 / t.rate for t in found])
        rate = 1e-6 / slope
        of_nominal = percent(100 * rate / chip.bandwidth_gb_s)
        row = [f"{name}, {chip.cores}", model, digits(rate), of_nominal, f"{constant:.1f}"]
        table.rows.append(row)
    return table


def compared_kernels() -> Table:
    columns = ["chip", "M×N×K", "format", "published µs", "predicted", "bound"]
    columns += ["speed, published of predicted", "source"]
    table = Table("One product: published measurements of peers' kernels", columns)
    for c in KERNELS:
        p = predict(c.m, c.n, c.k, c.format, c.chip)
        row = [c.chip, f"{c.m}×{c.n}×{c.k}", c.format, f"{c.us:g}", digits(p.total), p.bound]
        source = f"{c.source}; {c.remark}" if c.remark else c.source
        table.rows.append([*row, percent(100 * p.total / c.us), source])
    return table


def block() -> str:
    """The tables that docs/chip-model.md has."""
    return "\n\n".join(map(to_markdown, (fits(), compared_kernels())))


# ---- whole tokens

TOKENS_PAGE, TOKENS_COMMAND = ROOT / "docs" / "token-model.md", "chips --tokens"
FORMAT = "affine4_g64"
SHOWN = ("Llama 3.1 8B", "Llama 3.2 3B", "Qwen3 4B", "Qwen3 0.6B")
CHIP = "m4-max"  # of the tables of one
CONTEXTS = (CONTEXT, 2048, 8192, 32768)
CACHES = ("f16", "f16/q8_0", "f16/q4_0")


_BLOG = "runanywhere.ai blog, March 2026, best of 5"
_MLX_LM = "mlx-lm BENCHMARKS.md, after 2048 tokens", 2048


def _of_blog(model: str, **rates: float) -> list[Tokens]:
    names = {"mlx_lm": "mlx-lm", "llama_cpp": "llama.cpp", "uzu": "uzu", "metal_rt": "MetalRT"}
    found = rates.items()
    return [Tokens("m4-max", model, FORMAT, names[n], rate, _BLOG) for n, rate in found]


# The newest row of TOKENS for Llama 2 on the largest configuration of each chip.
_LLAMA_CPP = {
    t.chip: t for t in TOKENS if (t.cores, t.format, t.model) == (None, "q4_0", "Llama 2 7B")
}
PUBLISHED = (
    *_of_blog("Qwen3 0.6B", metal_rt=658, uzu=627, mlx_lm=552),
    *_of_blog("Qwen3 4B", metal_rt=186, mlx_lm=170, uzu=165, llama_cpp=87),
    Tokens("m4-max", "Qwen3 4B", FORMAT, "mlx-lm", 134.5, *_MLX_LM),
    *_of_blog("Llama 3.2 3B", uzu=222, mlx_lm=210, metal_rt=184, llama_cpp=137),
    Tokens("m4-pro", "Qwen3 0.6B", "q4_0", "akunu", 465, "akunu's book"),
    Tokens("m4-pro", "Qwen3 0.6B", "q4_0", "llama.cpp", 169, "akunu's book"),
    *_LLAMA_CPP.values(),
)
_TRANSFORMERS, _SGLANG = "transformers pull request 45977, q4_k_m", "sglang issue 32321"
EAGER = (
    Tokens("m3-max", "Llama 3.2 3B", "q4_k", "transformers, ggml kernels", 49.2, _TRANSFORMERS),
    Tokens("m3-max", "Llama 3.2 3B", "q4_k", "the same, compiled", 68.8, _TRANSFORMERS),
    Tokens("m3-pro", "Qwen3 0.6B", "bf16", "torch, eager", 18.1, _SGLANG),
    Tokens("m3-pro", "Qwen3 0.6B", "bf16", "mlx-lm", 80.8, _SGLANG),
)


def rate(
    model: str,
    format: str,
    chip: str,
    form: str,
    op_us: float = OP_US,
    context: int = CONTEXT,
    cache: str | None = None,
) -> float:
    """Tokens per second."""
    return 1e6 / token_time(model, format, chip, form, op_us, context, cache).total


def rates_table() -> Table:
    columns = ["chip", *(f"{m}" for m in SHOWN)]
    title = f"Predicted tokens/s: {' / '.join(FORMS)}; {FORMAT}, x f16"
    table = Table(title, columns)
    for chip in CHIPS:
        cells = ((digits(rate(m, FORMAT, chip, form)) for form in FORMS) for m in SHOWN)
        table.rows.append([chip, *(" / ".join(cell) for cell in cells)])
    return table.joined()


def compared(title: str, published: tuple[Tokens, ...], wanted: str) -> Table:
    columns = ["chip", "model", "format", "program", "published", *FORMS]
    columns += [f"{wanted} of published", "source"]
    table = Table(f"{title}: tokens/s published, and predicted for us", columns)
    for p in published:
        found = {f: rate(p.model, p.format, p.chip, f, context=p.context) for f in FORMS}
        row = [p.chip, p.model, p.format, p.program, f"{p.rate:g}"]
        row += [digits(value) for value in found.values()]
        table.rows.append([*row, percent(100 * found[wanted] / p.rate), p.source])
    return table


def contexts_table(contexts: Sequence[int], caches: Sequence[str]) -> Table:
    """After contexts: fused with DynamicCache, replayed with PackedCaches."""
    title = f"Predicted tokens/s on an {CHIP}, {FORMAT}, by context and cache: fused, replayed"
    table = Table(title, ["model, cache", *(f"{n} tokens" for n in contexts)])
    for model in SHOWN:
        for cache in (None, *caches):
            name = f"PackedCache {cache}" if cache else "DynamicCache f16"
            form = "replayed" if cache else "fused"
            found = (rate(model, FORMAT, CHIP, form, OP_US, n, cache) for n in contexts)
            table.rows.append([f"{model}, {name}", *map(digits, found)])
    return table


def tokens_block() -> str:
    """The tables that docs/token-model.md has."""
    tables = (
        rates_table(),
        compared("Native programs", PUBLISHED, "replayed"),
        compared("Python programs", EAGER, "unfused"),
        contexts_table(CONTEXTS, CACHES),
    )
    return "\n\n".join(map(to_markdown, tables))


def print_(args: argparse.Namespace) -> None:
    """With --tokens those of tokens; with --context or --cache that of tokens by both alone."""
    if not args.tokens and (args.context or args.cache):
        raise ValueError("--context and --cache: only with --tokens")
    if args.context or args.cache:
        contexts = parse_ints(args.context, least=0) if args.context else CONTEXTS
        caches = caches_named(args.cache) if args.cache else CACHES
        print(to_markdown(contexts_table(contexts, caches)))
    elif args.tokens:
        print(tokens_block())
    else:
        print(block(), to_markdown(rows_table()), sep="\n\n")

"""`python -m bench chips --tokens`: whole tokens on Macs, predicted, beside what others published.

No figure here was measured by this project: the predictions are torch_metalmm.tools.token_time's,
the published ones their authors'.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch_metalmm.msl.build import ROOT
from torch_metalmm.tools.token_time import CONTEXT, FORMS, OP_US, token_time

from ..models.cache_cost import named
from ..shapes import parse_ints
from ..tables import Table, digits, percent, to_markdown
from . import chips
from .chips import Tokens

PAGE = ROOT / "docs" / "token-model.md"
COMMAND = "chips --tokens"
FORMAT = "affine4_g64"
SHOWN = ("Llama 3.1 8B", "Llama 3.2 3B", "Qwen3 4B", "Qwen3 0.6B")
APART = "m4-max"  # the chip whose tokens are taken apart
OP_TIMES = (2.0, 5.0, OP_US, 30.0)
CONTEXTS = (CONTEXT, 2048, 8192, 32768)
CACHES = ("f16", "f16/q8_0", "f16/q4_0")


_BLOG = "runanywhere.ai blog, March 2026, best of 5"
_MLX_LM = "mlx-lm BENCHMARKS.md, after 2048 tokens", 2048


def _of_blog(model: str, **rates: float) -> list[Tokens]:
    names = {"mlx_lm": "mlx-lm", "llama_cpp": "llama.cpp", "uzu": "uzu", "metal_rt": "MetalRT"}
    found = rates.items()
    return [Tokens("m4-max", model, FORMAT, names[n], rate, _BLOG) for n, rate in found]


# The newest row of chips.TOKENS for Llama 2 on the largest configuration of each chip.
_LLAMA_CPP = {
    t.chip: t for t in chips.TOKENS if (t.cores, t.format, t.model) == (None, "q4_0", "Llama 2 7B")
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
    for chip in chips.CHIPS:
        cells = ((digits(rate(m, FORMAT, chip, form)) for form in FORMS) for m in SHOWN)
        table.rows.append([chip, *(" / ".join(cell) for cell in cells)])
    return table.joined()


def apart_table() -> Table:
    """Where the milliseconds of one chip go."""
    columns = ["model, form", "products", "keys, values", "our passes", "other kernels", "GPU"]
    columns += ["host beside it", "not overlapping", "ms", "bound by"]
    table = Table(f"A token of {FORMAT} on an {APART}: launches, ms", columns)
    for model in SHOWN:
        for form in FORMS:
            t = token_time(model, FORMAT, APART, form)
            ms = [digits(us / 1e3) for us in (t.products, t.attention)]
            row = [f"{model}, {form}", *ms, str(t.passes), str(t.others), digits(t.gpu / 1e3)]
            row += [digits(us / 1e3) if us else "0" for us in (t.host, t.beside)]
            table.rows.append([*row, digits(t.total / 1e3), t.bound])
    return table


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


def host_table() -> Table:
    """The rates predicted for several times of an op of torch on the host."""
    columns = ["model, form", *(f"{us:g} µs an op" for us in OP_TIMES)]
    table = Table(f"Predicted tokens/s on an {APART}, by the time of an op on the host", columns)
    for model in SHOWN:
        for form in ("unfused", "fused", "replayed"):
            found = (rate(model, FORMAT, APART, form, us) for us in OP_TIMES)
            table.rows.append([f"{model}, {form}", *map(digits, found)])
    return table


def contexts_table(contexts: Sequence[int], caches: Sequence[str]) -> Table:
    """After contexts: fused with DynamicCache, replayed with PackedCaches."""
    title = f"Predicted tokens/s on an {APART}, {FORMAT}, by context and cache: fused, replayed"
    table = Table(title, ["model, cache", *(f"{n} tokens" for n in contexts)])
    for model in SHOWN:
        for cache in (None, *caches):
            name = f"PackedCache {cache}" if cache else "DynamicCache f16"
            form = "replayed" if cache else "fused"
            found = (rate(model, FORMAT, APART, form, OP_US, n, cache) for n in contexts)
            table.rows.append([f"{model}, {name}", *map(digits, found)])
    return table


def markdown() -> str:
    """All tables."""
    return "\n\n".join((block(), *map(to_markdown, (apart_table(), host_table()))))


def block() -> str:
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
        caches = named(args.cache) if args.cache else CACHES
        print(to_markdown(contexts_table(contexts, caches)))
    else:
        print(markdown() if args.tokens else chips.markdown())

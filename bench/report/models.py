"""Records of whole models, of caches and of `serve` -> tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..tables import ABSENT, Table, digits, percent, scientific

Record = dict[str, Any]
Columns = list[tuple[str, Callable[[Record], str]]]
KINDS = ("packed", "ours", "attention", "others")


def model_tables(records: Sequence[Record]) -> list[Table]:
    """Those of all kinds of records here."""
    tables = []
    for kind, made in MAKERS.items():
        found = [r for r in records if r["kind"] == kind]
        for model in dict.fromkeys(r.get("model", "") for r in found):
            tables += made(model, [r for r in found if r.get("model", "") == model])
    return tables


def _table(title: str, records: Sequence[Record], columns: Columns) -> Table:
    rows = [[text(r) for _, text in columns] for r in records]
    return Table(title, [name for name, _ in columns], rows)


def _range(name: str) -> Callable[[Record], str]:
    """Quartiles, "" where there is no such figure."""

    def text(r: Record) -> str:
        if f"{name}_q1" not in r:
            return ""
        return f"{digits(r[f'{name}_q1'])}–{digits(r[f'{name}_q3'])}"

    return text


def _number(name: str, unit: float = 1.0) -> Callable[[Record], str]:
    def text(r: Record) -> str:
        value = r.get(name)
        return digits(value if value is None else value / unit)

    return text


def _count(name: str) -> Callable[[Record], str]:
    return lambda r: ABSENT if r[name] is None else f"{r[name]:.0f}"


def _error(r: Record) -> str:
    return scientific(r["error"]) if r["ok"] else "WRONG"


def tokens(model: str, cells: Sequence[Record]) -> list[Table]:
    """Tokens per second of every system, and where a token's time goes."""
    columns: Columns = [("system", lambda r: str(r["system"]))]
    columns += [("MB", _number("weight_bytes", 1e6))]
    columns += [("decode tok/s", _number("decode")), ("quartiles", _range("decode"))]
    columns += [(f"prefill {cells[0]['prompt']}", _number("prefill"))]
    columns += [("quartiles", _range("prefill"))]
    if any("prefill_gpu_ms" in r for r in cells):
        columns += [("prefill, GPU ms", _number("prefill_gpu_ms"))]
    if any("gain" in r for r in cells):
        columns += [("by fuse_", lambda r: f"× {r['gain']:.3f}" if "gain" in r else "")]
        columns += [("quartiles", _range("gain"))]
    return [_table(model, cells, [*columns, ("error", _error)]), *parts(model, cells)]


def parts(model: str, cells: Sequence[Record]) -> list[Table]:
    """Milliseconds and numbers of the products of packed weights, of our other kernels, of
    attention and of other kernels, and our passes on a GPU. The host: on a CPU what is beside the
    kernels, else the time until the step has been given to the GPU."""
    cells = [r for r in cells if "packed_launches" in r]
    if not cells:
        return []

    def host(r: Record) -> str:
        times = [r[f"{kind}_ms"] for kind in KINDS]
        if r.get("device", "cpu") != "cpu":
            return digits(r["host_ms"])
        return ABSENT if None in times else digits(max(0.0, r["ms"] - sum(times)))

    def time(kind: str) -> Callable[[Record], str]:
        name = f"{kind}_ms"
        return lambda r: digits(r[name]) if r[name] else _count(name)(r)

    short = {"attention": "attn"}
    columns: Columns = [("system", lambda r: str(r["system"]))]
    columns += [("ms", _number("ms")), ("quartiles", _range("ms"))]
    columns += [(f"{short.get(kind, kind)} ms", time(kind)) for kind in KINDS]
    columns += [("host ms", host)]
    columns += [(short.get(kind, kind), _count(f"{kind}_launches")) for kind in KINDS]
    title = f"{model}: ms of a token after {cells[0]['context']}, and launches"
    return [_table(title, cells, [*columns, ("passes", _count("passes"))])]


def contexts(model: str, cells: Sequence[Record]) -> list[Table]:
    """ms of a token after each context, and where they go after the longest."""
    columns = ["system"]
    wanted = list(dict.fromkeys(r["context"] for r in cells))
    for context in wanted:
        columns += [f"ms after {context}", "quartiles", "speed"]
    table = Table(f"{model}: speed by DynamicCache's, or StaticCache's", [*columns, "error"])
    for system in dict.fromkeys(r["system"] for r in cells):
        found = {r["context"]: r for r in cells if r["system"] == system}
        row = [system]
        for r in map(found.get, wanted):
            if r is None:
                row += [ABSENT] * 3
            else:
                gain = f"{r['gain']:.2f}×" if "gain" in r else ""
                row += [digits(r["ms"]), _range("ms")(r), gain]
        worst = max(found.values(), key=lambda r: float(r["error"]))
        table.rows.append([*row, _error(worst | {"ok": all(r["ok"] for r in found.values())})])
    return [table, *parts(model, cells)]


def layers(model: str, cells: Sequence[Record]) -> list[Table]:
    """What a layer costs where nothing is computed, how much of it in ops, which ones, and what the
    rest of a step costs. Views are ops that compute nothing."""
    columns: Columns = [("system", lambda r: str(r["system"]))]
    columns += [("µs a layer", _number("layer_us")), ("quartiles", _range("layer_us"))]
    columns += [("in ops", _number("ops_us")), ("beside", _number("beside_us"))]
    of = "of_unfused"
    columns += [("of unfused", lambda r: f"{100 * r[of]:.0f} %" if of in r else "")]
    for name in ("our_ops", "other_ops", "views"):
        columns += [(name.replace("_", " "), _number(name))]
    return [_table(model, cells, columns)]


def quality(model: str, cells: Sequence[Record]) -> list[Table]:
    """Quality and bytes of the formats."""
    first = cells[0]

    def name(r: Record) -> str:
        others = [f"{100 * v:.0f} % {n}" for n, v in r["formats"].items() if n != r["variant"]]
        return str(r["variant"]) + (f" ({', '.join(others)})" if others and r is not first else "")

    columns: Columns = [("", name), ("MB", _number("bytes", 1e6))]
    columns += [("less than f16", lambda r: percent(100 * (1 - r["bytes"] / r["f16_bytes"])))]
    if "perplexity" in first:
        of = f"{first['tokens']} tokens"
        columns += [("perplexity", lambda r: f"{r['perplexity']:.2f}")]
        columns += [("divergence", lambda r: f"{r['divergence']:.4f}")]
        columns += [("same top token", lambda r: f"{100 * r['same_top']:.1f} %")]
    else:
        of = f"{first['sentences']} sentences"
        columns += [("cosine", lambda r: f"{r['cosine']:.5f}")]
        columns += [("worst", lambda r: f"{r['worst_cosine']:.5f}")]
        change = "similarity_change"
        columns += [("largest change of a similarity", lambda r: f"{r[change]:.4f}")]
    if "weighted_error" in first:
        same = "same_bytes"
        columns += [("weighted error", lambda r: f"{r['weighted_error']:.5f}")]
        columns += [
            (
                "bytes as llama.cpp's",
                lambda r: "" if r[same] is None else f"{100 * r[same]:.2f} %",
            )
        ]
    return [_table(f"{model}; {of}", cells, columns)]


def cache_bytes(model: str, cells: Sequence[Record]) -> list[Table]:
    """Bytes of a token and of contexts, by the format."""
    f16 = next((r["token"] for r in cells if r["format"] == "f16"), None)
    columns: Columns = [("cache", lambda r: str(r["format"]))]
    columns += [("kB a token", _number("token", 1e3))]
    for s in cells[0]["sizes"]:
        title = f"GB of {int(s) // 1024}k tokens"
        columns += [(title, lambda r, s=s: digits(r["sizes"][s] / 1e9))]
    of = (lambda r: percent(100 * r["token"] / f16)) if f16 else lambda r: ABSENT
    return [_table("Llama 3.1 8B: keys and values", cells, [*columns, ("of f16", of)])]


def cache_quality(model: str, cells: Sequence[Record]) -> list[Table]:
    """What a model predicts with each cache, and how long its greedy answers are the same."""
    columns: Columns = [("cache", lambda r: str(r["cache"]))]
    columns += [("perplexity", lambda r: f"{r['perplexity']:.3f}")]
    columns += [("divergence", lambda r: scientific(max(0.0, r["divergence"])))]
    columns += [("same top token", lambda r: f"{100 * r['same_top']:.2f} %")]
    answers, length = len(cells[0]["equal"]), cells[0]["answer"]
    title = f"equal tokens, {answers} answers of {length}"
    columns += [(title, lambda r: ", ".join(map(str, r["equal"])))]
    return [_table(model, cells, columns)]


def serve(model: str, cells: Sequence[Record]) -> list[Table]:
    """One client beside generate()."""

    def with_range(name: str) -> Callable[[Record], str]:
        return lambda r: f"{digits(r[name])} ({_range(name)(r)})"

    columns: Columns = [("way", lambda r: str(r["way"]))]
    columns += [("first token, ms (quartiles)", with_range("first_ms"))]
    columns += [("tokens/s after it (quartiles)", with_range("tokens_s"))]
    return [_table(f"One client, {cells[0]['tokens']} tokens", cells, columns)]


def serve_clients(model: str, cells: Sequence[Record]) -> list[Table]:
    """Several clients at once."""
    columns: Columns = [("tokens/s of all", _number("tokens_s"))]
    columns += [(name, lambda r, name=name: str(r[name])) for name in ("answers", "errors")]
    columns += [("memory before, MB", _number("resident", 1e6))]
    columns += [("growth, MB", lambda r: f"{r['growth'] / 1e6:.1f}")]
    title = f"{cells[0]['clients']} clients, {cells[0]['seconds']:.0f} s"
    return [_table(title, cells, columns)]


def ops(model: str, cells: Sequence[Record]) -> list[Table]:
    """Of a token, in families of models, by layer and beside the layers."""
    columns: Columns = [("family", lambda r: f"`{r['family']}`")]
    for name in ("before", "after"):
        columns += [(f"layers {name}", lambda r, n=name: ", ".join(map(str, r[f"layers_{n}"])))]  # type: ignore[misc]
    for name in ("before", "after"):
        columns += [(f"beside them {name}", _count(f"beside_{name}"))]
    return [_table(model, cells, columns)]


MAKERS: dict[str, Callable[[str, Sequence[Record]], list[Table]]] = {
    "tokens": tokens,
    "context": contexts,
    "layers": layers,
    "ops": ops,
    "quality": quality,
    "cache-bytes": cache_bytes,
    "cache-quality": cache_quality,
    "serve": serve,
    "serve-clients": serve_clients,
}

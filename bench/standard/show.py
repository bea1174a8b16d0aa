"""A record as text, as the ratios of two records, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_metalmm.extras import require
from torch_metalmm.tools.chat.screen import harmless

from ..plots import label, picture
from ..tables import ABSENT, Table, digits, percent
from .record import Layer, figures, layers, replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_MODEL = (
    "no prediction: the chip model has none of this chip; times are to be held against the roofs"
)
LAYER_COLUMNS = ["variant", "M", "µs", "IQR", "GB/s", "vs F.linear", "of roofs"]
TOKEN_COLUMNS = ["form", "ms", "IQR", "tokens/s", "prompt, tokens/s", "ms, bytes alone"]
MODEL_COLUMNS = ["predicted", "measured / predicted"]  # where there is a prediction


def head(record: Mapping[str, Any]) -> list[str]:
    """The machine, the versions and the chip that predictions are for."""
    r = record
    hf = f", transformers {r['transformers']}" if r["transformers"] else ""
    model = r["model"]
    lines = [
        f"{r['chip']}, {r['cores']} cores, {r['memory_gb']:g} GB; {r['cpu']}; {r['system']}",
        f"torch_metalmm {r['package']}, torch {r['torch']}{hf}, Python {r['python']}; "
        f"{r['device']}, x in {r['dtype']}, {r['threads']} threads; "
        f"load average before the run {r['load_before']}",
        NO_MODEL
        if model is None
        else f"predictions are for {model['name']}, {model['cores']} cores, "
        f"{model['bandwidth_gb_s']:g} GB/s; nobody has measured how good they are",
    ]
    if r["is_quick"]:
        lines.append("--quick: small and not cold, a smoke test only")
    return lines


def roof_table(record: Mapping[str, Any]) -> Table:
    roofs = record["roofs"]
    table = Table("What the machine reached", ["", "rate"])
    table.rows.append(["memory, reading", f"{digits(roofs['read_gb_s'])} GB/s"])
    table.rows.append(["arithmetic, the roof of products", f"{digits(roofs['gflop_s'])} GFLOP/s"])
    for name, rate in roofs["mm_gflop_s"].items():
        table.rows.append([f"torch.mm {name}", f"{digits(rate)} GFLOP/s"])
    return table


def times(value: float | None) -> str:
    return ABSENT if value is None else f"{digits(value)}×"


def beside_model(record: Mapping[str, Any], measured: float, predicted: float | None) -> list[str]:
    """The cells of MODEL_COLUMNS; none where the record has no prediction."""
    if record["model"] is None:
        return []
    return [digits(predicted), digits(measured / predicted if predicted else None)]


def columns(record: Mapping[str, Any], measured: list[str]) -> list[str]:
    return measured + ([] if record["model"] is None else MODEL_COLUMNS)


def layer_table(record: Mapping[str, Any]) -> Table:
    named = {c["shape"]: f"{c['n']}×{c['k']}" for c in record["products"]}
    counts = ", ".join(f"{n} of {named.get(s, s)}" for s, n in record["layer"].items())
    table = Table(f"The products of a layer: {counts}", columns(record, LAYER_COLUMNS))
    for x in layers(record):
        table.rows.append(
            [
                *(x.variant, str(x.m), digits(x.us), percent(100 * x.spread / x.us)),
                *(digits(x.gb_s), times(x.speedup), percent(100 * x.part_of_roof)),
                *beside_model(record, x.us, x.predicted_us),
            ]
        )
    return table


def token_table(record: Mapping[str, Any]) -> Table:
    done = [t for t in record["tokens"] if "ms" in t]
    title = f"A token: {done[0]['model']}, {done[0]['format']}" if done else "A token"
    table = Table(title, columns(record, TOKEN_COLUMNS))
    for t in done:
        table.rows.append(
            [
                *(t["form"], digits(t["ms"]), percent(100 * (t["ms_q3"] - t["ms_q1"]) / t["ms"])),
                *(digits(1e3 / t["ms"]), digits(t.get("prefill")), digits(t["roof_ms"])),
                *beside_model(record, t["ms"], t["predicted_ms"]),
            ]
        )
    return table


def remarks(record: Mapping[str, Any]) -> list[str]:
    """The measurements that were left out, and the results that were wrong."""
    out = [f"left out: {s['what']}: {s['why']}" for s in record["skipped"]]
    for c in record["products"]:
        if not c["ok"]:
            what = f"{c['variant']}, W {c['n']}×{c['k']}, {c['m']} rows"
            out.append(f"WRONG: {what}: error {c['worst']:.3g} of its bound")
    out += [
        f"WRONG: {t['model']}, {t['form']}: error {t['error']:.3g}"
        for t in record["tokens"]
        if not t["ok"]
    ]
    return out


def named(record: Mapping[str, Any]) -> str:
    """A record in a line."""
    r = record
    versions = f"torch_metalmm {r['package']}, torch {r['torch']}"
    return f"{r['chip']}, {r['cores']} cores, {r['device']}, {r['dtype']}; {versions}; {r['date']}"


def comparison(a: Mapping[str, Any], b: Mapping[str, Any]) -> Table:
    """The figures that both have, and their ratio. ValueError: there are none, or one was quick."""
    if a["is_quick"] != b["is_quick"]:
        raise ValueError("one of the records is of --quick: they measure different things")
    left, right = figures(a), figures(b)
    names = [name for name in left if name in right]
    if not names:
        raise ValueError("the records have no figure in common")
    table = Table("", ["", "first", "second", "second / first"])
    for name in names:
        ratio = digits(right[name] / left[name])
        table.rows.append([harmless(name), digits(left[name]), digits(right[name]), ratio])
    return table


# ---- the picture: how near to the roofs a layer comes, and how much faster than torch

INCHES = (12.0, 5.0)


def by_variant(found: Sequence[Layer]) -> dict[str, list[Layer]]:
    """Our variants, each by M."""
    ours = [x for x in found if x.format]
    return {name: [x for x in ours if x.variant == name] for name in {x.variant: 0 for x in ours}}


def one_row(ax: Axes, record: Mapping[str, Any], lines: Mapping[str, Sequence[Layer]]) -> None:
    """Bars of GB/s at the least M, a mark where the model says, the roof as a line."""
    least = min(x.m for line in lines.values() for x in line)
    some = [x for line in lines.values() for x in line if x.m == least]
    ax.bar(range(len(some)), [x.gb_s for x in some], color=[f"C{i % 10}" for i in range(len(some))])
    marked = [
        (i, x.weight_bytes / x.predicted_us / 1e3) for i, x in enumerate(some) if x.predicted_us
    ]
    if marked:
        ax.plot(*zip(*marked, strict=True), "D", color="black", label="the chip model's prediction")
    ax.axhline(record["roofs"]["read_gb_s"], color="black", linewidth=1, label="memory, measured")
    ax.set_xticks(
        range(len(some)), [label({"variant": x.variant}) for x in some], rotation=30, ha="right"
    )
    ax.set(ylabel="GB/s of weights", title=f"A layer, M = {least}")


def against_torch(ax: Axes, lines: Mapping[str, Sequence[Layer]]) -> None:
    for i, (variant, line) in enumerate(lines.items()):
        points = [(x.m, x.speedup) for x in line if x.speedup is not None]
        if points:
            style = {"color": f"C{i % 10}", "marker": "o", "markersize": 4}
            ax.plot(*zip(*points, strict=True), **style, label=label({"variant": variant}))
    ms = sorted({x.m for line in lines.values() for x in line})
    ax.axhline(1, color="black", linewidth=1)
    ax.set(xscale="log", yscale="log", xlabel="M, rows of x", title="times as fast as F.linear")
    ax.set_xticks(ms, [str(m) for m in ms])
    ax.minorticks_off()
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16) if ax.get_ylim()[0] <= t <= ax.get_ylim()[1]]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.grid(alpha=0.3)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Writes the picture. ImportError: no matplotlib. ValueError: nothing to draw."""
    lines = by_variant(layers(record))
    if not lines:
        raise ValueError("no picture: no layer was timed as a whole")
    require("a picture", "matplotlib")
    title = f"{record['chip']}, {record['device']}, torch_metalmm {record['package']}"
    with replaced(path) as new, picture(new, INCHES, columns=2) as (figure, (left, right)):
        one_row(left, record, lines)
        against_torch(right, lines)
        figure.legend(loc="outside right upper", fontsize="small")
        figure.suptitle(f"{title}, torch {record['torch']}, {record['date']}")

"""The picture of a record: how near to the roofs a layer comes, and how much faster than torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_metalmm.extras import require

from ..plots import label, picture
from .layers import Layer, layers
from .record import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

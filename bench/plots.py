"""Records of `python -m bench --json` -> PNG: GB/s by shape, time against M."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import Record, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 110  # 880 x 550 pixels: some 60 KB
OWN_LINES = ("-", ":", "-.", (0, (1, 4)), (0, (8, 2)))


def measured(records: Sequence[Record]) -> list[Record]:
    """The cells that were right and timed; the last record of a cell that was measured twice.

    ValueError: runs of different machines, whose times have nothing in common.
    """
    machines = {r["machine"] for r in records if "machine" in r}
    if len(machines) > 1:
        raise ValueError(f"the records are of several machines: {', '.join(sorted(machines))}")
    key = ("n", "k", "m", "variant")
    cells = [r for r in records if r["kind"] == "matmul" and "us" in r]
    return list({tuple(c[x] for x in key): c for c in cells}.values())


def label(r: Record) -> str:
    """A variant as a legend names it, without what all rows of a plot share."""
    return str(r["variant"]).removeprefix("metalmm ").removesuffix(" float16")


def styles(cells: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """{variant: how its line is drawn}: peers dashed and grey to black, the others in colours.

    Beyond the 20 colours line styles tell them apart; bars, which have none, go by their order.
    """
    from matplotlib import colormaps

    names = {c["variant"]: bool(c["format"]) for c in cells}
    own = [name for name, packed in names.items() if packed]
    peers = [name for name, packed in names.items() if not packed]
    few = colormaps["tab10" if len(own) <= 10 else "tab20"]
    out: dict[str, dict[str, Any]] = {
        name: {"color": few(i % few.N), "linestyle": OWN_LINES[i // few.N % len(OWN_LINES)]}
        for i, name in enumerate(own)
    }
    for i, name in enumerate(peers):
        out[name] = {"color": str(0.7 * i / len(peers)), "linestyle": "--"}
    return out


def bandwidth(figure: Figure, ax: Axes, cells: Sequence[Record]) -> None:
    """GB/s of weight bytes at the least M, a group per shape, a bar per variant; the roof above."""
    least = min(c["m"] for c in cells)
    cells = [c for c in cells if c["m"] == least]
    shapes = list(dict.fromkeys(f"{c['n']}×{c['k']}" for c in cells))
    width = 0.85 / len({c["variant"] for c in cells})
    style, first = styles(cells), {c["variant"]: c for c in reversed(cells)}
    for i, name in enumerate(style):
        found = {f"{c['n']}×{c['k']}": c["gbs"] for c in cells if c["variant"] == name}
        at = [j + (i - (len(style) - 1) / 2) * width for j, s in enumerate(shapes) if s in found]
        heights = [found[s] for s in shapes if s in found]
        ax.bar(at, heights, width, label=label(first[name]), color=style[name]["color"])
    for j, shape in enumerate(shapes):
        roofs = [c["roof_gbs"] for c in cells if f"{c['n']}×{c['k']}" == shape]
        ax.hlines(max(roofs), j - 0.45, j + 0.45, color="black", linewidth=1)
    ax.set_xticks(range(len(shapes)), shapes)
    ax.set(ylabel="GB/s of W", title=f"M = {least}; line: read roof of the run")
    figure.legend(loc="outside right upper", fontsize="small")


def time_by_m(figure: Figure, ax: Axes, cells: Sequence[Record]) -> None:
    """Time against M at the shape that has most M."""
    by_shape: dict[tuple[int, int], set[int]] = {}
    for c in cells:
        by_shape.setdefault((c["n"], c["k"]), set()).add(c["m"])
    n, k = max(by_shape, key=lambda s: len(by_shape[s]))
    cells = [c for c in cells if (c["n"], c["k"]) == (n, k)]
    for name, style in styles(cells).items():
        line = sorted((c for c in cells if c["variant"] == name), key=lambda c: int(c["m"]))
        if len(line) < 2:  # a point is no curve
            continue
        ms, us = [c["m"] for c in line], [c["us"] for c in line]
        ax.plot(ms, us, **style, marker=".", markersize=4, linewidth=1.2, label=label(line[0]))
    ticks = [m for m in (1 << i for i in range(20)) if m <= max(c["m"] for c in cells)]
    ax.set(xscale="log", yscale="log", xlabel="M", ylabel="µs", title=f"W {n}×{k}")
    ax.set_xticks(ticks, [str(m) for m in ticks])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")


PLOTS: dict[str, Callable[[Figure, Axes, Sequence[Record]], None]] = {
    "bandwidth": bandwidth,
    "time": time_by_m,
}


@contextmanager
def picture(
    path: Path, size: tuple[float, float] = FIGURE_INCHES, columns: int = 1
) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes, which are written to the path when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    yield figure, axes
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)


def draw(records: Sequence[Record], folder: Path, prefix: str = "") -> list[Path]:
    """Writes <prefix><plot>.png into folder for each of PLOTS.

    ValueError: nothing was timed, or not on one machine.
    """
    cells = measured(records)
    if not cells:
        raise ValueError("no cell in the records was timed: nothing to plot")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plot in PLOTS.items():
        written.append(folder / f"{prefix}{name}.png")
        with picture(written[-1]) as (figure, ax):
            plot(figure, ax, cells)
    return written


def print_(args: argparse.Namespace) -> None:
    records = [r for file in args.file for r in read_records(file)]
    print(*draw(records, args.output, args.prefix), sep="\n")

"""Records of `python -m bench --json` -> PNG: roofline, GB/s by shape, time against M."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_metalmm import _C
from torch_metalmm.format_table import FAMILIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
FIGURE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 110  # 880 x 550 pixels: some 60 KB
MARKERS = {"dense": "s", "GGML": "o", "MLX affine": "^"}
PEER_MARKER = "x"


def measured(records: Sequence[Record]) -> list[Record]:
    """The cells that were right and timed."""
    return [r for r in records if r["kind"] in ("matmul", "sweep") and "us" in r]


def intensity(r: Record) -> float:
    """Flops per byte of weight, the bytes that `percent_read` counts."""
    return float(2.0 * r["m"] * r["n"] * r["k"] / r["weight_bytes"])


def marker(r: Record) -> str:
    layouts = {str(f["name"]): str(f["layout"]) for f in _C.formats()}
    return MARKERS[FAMILIES[layouts[r["format"]]]] if r["format"] else PEER_MARKER


def roofline(ax: Axes, cells: Sequence[Record]) -> None:
    """GFLOP/s over flops per byte: every format and shape, M as colour, the run's own roofs."""
    from matplotlib.colors import LogNorm

    cells = [c for c in cells if c["kind"] == "matmul"]
    norm = LogNorm(1, max(2, *(c["m"] for c in cells)))
    for shape in dict.fromkeys(map(marker, cells)):
        some = [c for c in cells if marker(c) == shape]
        points = ax.scatter(
            [intensity(c) for c in some],
            [c["gflops"] for c in some],
            c=[c["m"] for c in some],
            marker=shape,
            norm=norm,
            s=18,
            label={v: k for k, v in MARKERS.items()}.get(shape, "peers"),
        )
    ax.figure.colorbar(points, ax=ax, label="M")
    read, peak = (sorted(c[f"roof_{k}"] for c in cells)[len(cells) // 2] for k in ("gbs", "gflops"))
    ends = [min(map(intensity, cells)) / 2, max(map(intensity, cells)) * 2]
    ridge = peak / read
    xs = sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]})
    ax.plot(xs, [min(peak, read * x) for x in xs], color="black", linewidth=1)
    ax.set(xscale="log", yscale="log", xlabel="flops per byte of W", ylabel="GFLOP/s")
    ax.set_title(f"Roofs measured in the run: {read:.0f} GB/s read, {peak:.0f} GFLOP/s")
    ax.legend()


def bandwidth(ax: Axes, cells: Sequence[Record]) -> None:
    """GB/s of weight bytes at the least M, a group per shape, a bar per variant; the roof above."""
    least = min(c["m"] for c in cells)
    cells = [c for c in cells if c["m"] == least and c["kind"] == "matmul"]
    shapes = list(dict.fromkeys(f"{c['n']}×{c['k']}" for c in cells))
    names = list(dict.fromkeys(c["variant"] for c in cells))
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        found = {f"{c['n']}×{c['k']}": c["gbs"] for c in cells if c["variant"] == name}
        at = [j + (i - (len(names) - 1) / 2) * width for j, s in enumerate(shapes) if s in found]
        ax.bar(at, [found[s] for s in shapes if s in found], width, label=name)
    for j, shape in enumerate(shapes):
        roofs = [c["roof_gbs"] for c in cells if f"{c['n']}×{c['k']}" == shape]
        ax.hlines(max(roofs), j - 0.45, j + 0.45, color="black", linewidth=1)
    ax.set_xticks(range(len(shapes)), shapes)
    ax.set(ylabel="GB/s of W", title=f"M = {least}; line: read roof of the run")
    ax.legend(fontsize="x-small", ncols=max(1, len(names) // 8))


def time_by_m(ax: Axes, cells: Sequence[Record]) -> None:
    """Time against M of every variant at the shape that has most M."""
    by_shape: dict[tuple[int, int], set[int]] = {}
    for c in cells:
        by_shape.setdefault((c["n"], c["k"]), set()).add(c["m"])
    n, k = max(by_shape, key=lambda s: len(by_shape[s]))
    cells = [c for c in cells if (c["n"], c["k"]) == (n, k)]
    for name in dict.fromkeys(c["variant"] for c in cells):
        line = sorted((c["m"], c["us"]) for c in cells if c["variant"] == name)
        style = "-" if any(c["format"] for c in cells if c["variant"] == name) else "--"
        ax.plot(*zip(*line, strict=True), style, marker=".", label=name)
    ax.set(xscale="log", yscale="log", xlabel="M", ylabel="µs", title=f"W {n}×{k}")
    ax.legend(fontsize="x-small")


PLOTS: dict[str, Callable[[Axes, Sequence[Record]], None]] = {
    "roofline": roofline,
    "bandwidth": bandwidth,
    "time": time_by_m,
}


def draw(records: Sequence[Record], folder: Path, prefix: str = "") -> list[Path]:
    """Writes <prefix><plot>.png for each of PLOTS into folder. ValueError: nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = measured(records)
    if not any(c["kind"] == "matmul" for c in cells):
        raise ValueError("no matmul cell in the records was timed: nothing to plot")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plot in PLOTS.items():
        figure, ax = plt.subplots(figsize=FIGURE_INCHES, layout="constrained")
        plot(ax, cells)
        path = folder / f"{prefix}{name}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        plt.close(figure)
        written.append(path)
    return written

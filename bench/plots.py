"""Pictures: GB/s of products by shape, of records; costs and savings of formats, of results.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_metalmm import formats

from .devices import ROOT
from .report import Record, read_records
from .tables import ABSENT, Table, digits, replace_block, to_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 110  # 880 x 550 pixels: some 60 KB


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


def colors(cells: Sequence[Record]) -> dict[str, str | tuple[float, ...]]:
    """{variant: the colour of its bars}: peers grey to black, the others in colours."""
    from matplotlib import colormaps

    names = {c["variant"]: bool(c["format"]) for c in cells}
    own = [name for name, packed in names.items() if packed]
    peers = [name for name, packed in names.items() if not packed]
    few = colormaps["tab10" if len(own) <= 10 else "tab20"]
    found = {name: few(i % few.N) for i, name in enumerate(own)}
    return found | {name: str(0.7 * i / len(peers)) for i, name in enumerate(peers)}


def bandwidth(figure: Figure, ax: Axes, cells: Sequence[Record]) -> None:
    """GB/s of weight bytes at the least M, a group per shape, a bar per variant; the roof above."""
    least = min(c["m"] for c in cells)
    cells = [c for c in cells if c["m"] == least]
    shapes = list(dict.fromkeys(f"{c['n']}×{c['k']}" for c in cells))
    width = 0.85 / len({c["variant"] for c in cells})
    color, first = colors(cells), {c["variant"]: c for c in reversed(cells)}
    for i, name in enumerate(color):
        found = {f"{c['n']}×{c['k']}": c["gbs"] for c in cells if c["variant"] == name}
        at = [j + (i - (len(color) - 1) / 2) * width for j, s in enumerate(shapes) if s in found]
        heights = [found[s] for s in shapes if s in found]
        ax.bar(at, heights, width, label=label(first[name]), color=color[name])
    for j, shape in enumerate(shapes):
        roofs = [c["roof_gbs"] for c in cells if f"{c['n']}×{c['k']}" == shape]
        ax.hlines(max(roofs), j - 0.45, j + 0.45, color="black", linewidth=1)
    ax.set_xticks(range(len(shapes)), shapes)
    ax.set(ylabel="GB/s of W", title=f"M = {least}; line: read roof of the run")
    figure.legend(loc="outside right upper", fontsize="small")


def print_(args: argparse.Namespace) -> None:
    """Draws the GB/s of records. ValueError: nothing was timed, or not on one machine."""
    cells = measured([r for file in args.file for r in read_records(file)])
    if not cells:
        raise ValueError("no cell in the records was timed: nothing to plot")
    with picture(args.output) as (figure, ax):
        bandwidth(figure, ax, cells)
    print(args.output)


# ---- formats

COMMAND = "plot-formats"
RESULTS = ROOT / "bench" / "results.md"
PAGE = ROOT / "docs" / "guide" / "formats.md"
PLOTS = ROOT / "docs" / "plots"
MOST_PERPLEXITY = 600  # end of the plot; beyond it a model predicts nothing

# Labels whose points have others beside them: how many points they stand apart, behind a line.
APART = {
    "quality": {
        "iq4_xs": (-42, -30),
        "q4_0": (-22, -48),
        "q8_0": (-16, 20),
        "affine8_g64": (-62, 36),
    },
    "speed": {"q4_0": (14, 12), "affine4_g64": (18, -16), "affine3_g64": (-8, -20)}
    | {"affine2_g64": (-8, -34), "q8_0": (10, 12), "affine8_g64": (12, -16)},
}
Rows = dict[str, dict[str, str]]


def read_table(page: str, heading: str, title: str) -> Rows:
    """{first cell: {column: cell}} of the table below a bold title of a section.

    ValueError: the page has no such table.
    """
    section = page.partition(f"\n{heading}\n")[2]
    found = re.search(rf"^\*\*{re.escape(title)}.*\n\n((?:\|.*\n)+)", section, re.M)
    if found is None:
        raise ValueError(f"{RESULTS.name}: no table {title!r} below {heading!r}")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()
    ]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def quality() -> tuple[Rows, Rows]:
    """SmolLM2 by format; the same with an importance matrix."""
    page, title = RESULTS.read_text("utf-8"), "SmolLM2-135M-Instruct, from its Q4_1 file"
    plain = read_table(page, "## Quality", title)
    return plain, read_table(page, "## Quality with an importance matrix", title)


def h200() -> dict[str, float]:
    """{format: µs of one row of f16 x and W 128256×4096}."""
    rows = read_table(RESULTS.read_text("utf-8"), "## H200: one row of x", "x f16, µs at M = 1")
    return {
        name: float(cell.split()[0]) for name, cell in rows["128256×4096"].items() if name != "W"
    }


def tokens() -> Rows:
    """SmolLM2 on two cores of a CPU, with exact and with rounded activations."""
    page = RESULTS.read_text("utf-8")
    return read_table(page, "### Tokens: CPU, int8 activations", "SmolLM2-135M-Instruct")


def short(row: str) -> str:
    """q4_k of "q4_k (80 % q5_0)"."""
    return row.split(" (")[0]


def of_matrix(name: str, weighed: Rows) -> str:
    """The perplexity with an importance matrix, ABSENT where the format searches nothing."""
    found = [r for k, r in weighed.items() if short(k) == f"{name}, imatrix"]
    return found[0]["perplexity"] if found else ABSENT


def bits(name: str) -> float:
    """The bits of a weight."""
    return 8 * formats.get(name).row_bytes(4096) / 4096


def table() -> Table:
    """A row for each format that was measured."""
    plain, weighed = quality()
    speed, cpu = h200(), tokens()
    columns = ["format", "bits", "MB", "perplexity", "with imatrix", "same top token"]
    out = Table("", [*columns, "CPU tok/s", "H200 µs"])
    for label, row in plain.items():
        name = short(label)
        if name not in formats.names():
            continue
        decode = cpu.get(f"metalmm {name}, fuse_", {}).get("decode tok/s", ABSENT)
        cells = [f"`{name}`{label.removeprefix(name)}", f"{bits(name):g}"]
        cells += [row["MB"], row["perplexity"], of_matrix(name, weighed), row["same top token"]]
        out.rows.append([*cells, decode, digits(speed.get(name))])
    return out


def marked(name: str) -> tuple[str, str]:
    """Mark and colour of a format's family."""
    return ("^", "tab:orange") if name.startswith("affine") else ("o", "tab:blue")


def name_point(ax: Axes, plot: str, name: str, at: tuple[float, float]) -> None:
    apart = APART[plot].get(name)
    line = {"arrowstyle": "-", "linewidth": 0.5} if apart else None
    text = {"xytext": apart or (4, 4), "textcoords": "offset points", "fontsize": 8}
    ax.annotate(name, at, arrowprops=line, **text)


def draw_quality(ax: Axes) -> None:
    """Perplexity over MB, with an importance matrix as a ring."""
    plain, weighed = quality()
    base = next(iter(plain.values()))
    for label, row in plain.items():
        name, mb = short(label), float(row["MB"])
        y = float(row["perplexity"])
        if name not in formats.names() or y > MOST_PERPLEXITY:
            continue
        mark, color = marked(name)
        ax.scatter([mb], [y], marker=mark, color=color, s=30)
        name_point(ax, "quality", name, (mb, y))
        better = of_matrix(name, weighed)
        if better != ABSENT and float(better) <= MOST_PERPLEXITY:
            ax.scatter(
                [mb], [float(better)], marker=mark, facecolors="none", edgecolors=color, s=30
            )
            ax.plot([mb, mb], [y, float(better)], color=color, linewidth=0.6)
    ax.axhline(float(base["perplexity"]), color="black", linewidth=0.8, linestyle="--")
    ax.set(yscale="log", xlabel="MB of the model", ylabel="perplexity", ylim=(70, MOST_PERPLEXITY))
    ax.set_yticks([80, 100, 150, 200, 300, 500], ["80", "100", "150", "200", "300", "500"])
    ax.minorticks_off()
    ax.set_title("SmolLM2-135M from its Q4_1 file (dashed); hollow: with an importance matrix")
    ax.grid(alpha=0.3)


def draw_speed(ax: Axes) -> None:
    """µs of one row of x over bits per weight, on the H200."""
    for name, us in h200().items():
        if name not in formats.names():
            continue  # torch's own product
        mark, color = marked(name)
        ax.scatter([bits(name)], [us], marker=mark, color=color, s=30)
        name_point(ax, "speed", name, (bits(name), us))
    ax.axhline(h200()["torch.mv"], color="black", linewidth=0.8, linestyle="--")
    ax.set(xlim=(2, 17), xlabel="bits per weight", ylabel="µs", ylim=(0, None))
    ax.set_title("One row of f16 x, W 128256×4096, NVIDIA H200; dashed: torch.mv f16")
    ax.grid(alpha=0.3)


def write() -> list[Path]:
    """Draws the plots and writes the table of the page; the files."""
    written = [PAGE]
    replace_block(PAGE, COMMAND, to_markdown(table()))
    for name, draw in (("format-quality", draw_quality), ("format-speed", draw_speed)):
        written.append(PLOTS / f"{name}.png")
        with picture(written[-1]) as (_, ax):
            draw(ax)
    return written


def print_formats(args: argparse.Namespace) -> None:
    print(*write(), sep="\n")

"""The table and the plots of docs/guide/formats.md are those of bench/results.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench import plots
from bench.tables import read_block, to_markdown


def test_the_page_has_the_figures_of_the_results() -> None:
    committed = read_block(plots.PAGE, plots.COMMAND)
    assert committed == to_markdown(plots.table()), "run python -m bench plot-formats"
    results = plots.RESULTS.read_text("utf-8")
    figures = re.findall(r"\d+\.\d\d\b", committed)
    assert len(figures) > 20 and not [f for f in figures if f not in results]


def test_plots_have_a_point_for_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2)
    plots.draw_quality(left)
    plots.draw_speed(right)
    named = [{text.get_text() for text in ax.texts} for ax in (left, right)]
    plt.close(figure)
    assert {"q4_k", "q8_0", "affine4_g64"} <= named[0] & named[1]
    assert "affine2_g64" not in named[0] and "torch.mv" not in named[1]

    page = tmp_path / "page.md"
    page.write_text("<!-- python -m bench plot-formats -->\n\n<!-- end of plot-formats -->\n")
    monkeypatch.setattr(plots, "PAGE", page)
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    assert all(file.stat().st_size for file in plots.write())
    assert read_block(page, plots.COMMAND) == to_markdown(plots.table())


def test_a_table_that_is_not_there_is_an_error() -> None:
    page = "\n## A\n\n**t: x**\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n\n## B\n"
    assert plots.read_table(page, "## A", "t") == {"1": {"a": "1", "b": "2"}}
    for heading, title in (("## B", "t"), ("## A", "u")):
        with pytest.raises(ValueError, match="no table"):
            plots.read_table(page, heading, title)

"""The notebook runs in a fresh kernel, and its committed outputs are what its cells print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")
pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")

from run_notebook import digest, executed, read, texts, words  # noqa: E402

# A path from the root of a file system, of two folders or more, or a home.
MACHINE = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+[\w.-]+|\b[A-Z]:\\|~/|site-packages")


def of_code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_its_outputs_are_those_of_its_cells(tmp_path: Path) -> None:
    """Not one output of a cell that was changed since, and the same words when it runs again."""
    committed = read()
    assert committed.metadata.outputs_of == digest(committed)
    again = executed(read(), tmp_path)
    assert [words(cell) for cell in of_code(committed)] == [words(c) for c in of_code(again)]
    counts = [cell.execution_count for cell in of_code(committed)]
    assert counts == [*range(1, len(counts) + 1)]


def test_it_tells_nothing_of_a_machine() -> None:
    found = {cell.id: MACHINE.findall("\n".join(texts(cell))) for cell in of_code(read())}
    assert not {name: paths for name, paths in found.items() if paths}

"""Runs docs/notebook.ipynb in a fresh kernel, and writes its outputs into it.

    .venv/bin/python tests/site/run_notebook.py

After every change of a cell: what readers see are the outputs of the cells they see, and
test_notebook.py fails where they are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
SECONDS = 300  # of a cell, on a machine that does other work, too
# tqdm misses ipywidgets, whose bars no page shows; peft asks transformers for an old name.
WARNINGS = ("ignore:IProgress not found", "ignore:`is_gradient_checkpointing` is deprecated")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def read() -> Any:
    """The notebook that is committed."""
    return nbformat.read(NOTEBOOK, as_version=4)


def digest(notebook: Any) -> str:
    """Of the sources of its code: what the outputs were made by."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook with the outputs of this machine; its files go into the folder.

    nbclient.exceptions.CellExecutionError: a cell raised. ValueError: one wrote a warning.
    """
    manager = AsyncKernelManager(
        # This Python, whatever kernels the user has installed.
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=str(folder / "kernel.json"),
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(folder)}
    env |= {"PYTHONWARNINGS": ",".join(WARNINGS), "TQDM_DISABLE": "1"}  # bars are for who waits
    env.pop("MPLBACKEND", None)
    done = nbformat.from_dict(notebook)
    client = NotebookClient(
        done,
        km=manager,
        timeout=SECONDS,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=env)
    for cell in done.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise ValueError(f"{cell.source}\nwrote on standard error: {output.text}")
    # What the kernel adds to these tells of the machine, not of the notebook.
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    done.metadata = nbformat.from_dict(
        {
            "kernelspec": spec,
            "language_info": {"name": "python"},
            "outputs_of": digest(done),
        }
    )
    return done


def texts(cell: Any) -> list[str]:
    """What the outputs of a cell say; of a picture, that there is one."""
    found = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            found.append(output.text)
        elif "image/png" in output.data:
            found.append("image/png")
        else:
            found.append(output.data["text/plain"])
    return found


def words(cell: Any) -> list[str]:
    """The texts without numbers, whose last digits are those of a machine's sums, and layout."""
    return [" ".join(NUMBER.sub("#", text).split()) for text in texts(cell)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        new = executed(read(), Path(folder))
    nbformat.write(new, NOTEBOOK)
    sys.stdout.write(f"{NOTEBOOK.relative_to(ROOT)}: {len(new.cells)} cells\n")

"""Every Python block of README.md and of the pages of docs runs.

The blocks of one section run one after the other in one folder and one process, each with names
of its own, which has imported what other projects' packages take long to import, and nothing of
this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked, forked
from places import ROOT

from torch_metalmm import testing

# The blocks of adding.md are pieces of files, which test_adding carries out.
PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
PAGES = tuple(name for name in PAGES if name != "docs/adding.md")


def sections() -> dict[str, list[str]]:
    """{"file: section": its Python blocks}."""
    found: dict[str, list[str]] = {}
    for name in PAGES:
        title, text = "", (ROOT / name).read_text(encoding="utf-8")
        # A block is taken whole, so that a comment in it is no title.
        for part in re.finditer(r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]*)$", text, re.M | re.S):
            if part[3] is not None:
                title = part[3]
            elif part[1] == "python":
                found.setdefault(f"{name}: {title}", []).append(part[2])
    return found


SECTIONS = sections()
_SCRIPT = """
import linecache, os
import torch, transformers.models.llama.modeling_llama, transformers.generation.utils

def run(folder, blocks):
    os.chdir(folder)
    for i, block in enumerate(blocks):
        name = f"block {i + 1}"
        linecache.cache[name] = len(block), None, block.splitlines(True), name
        exec(compile(block, name, "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Forked]:
    """Runs blocks in a folder."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with forked(_SCRIPT, env, "-W", "error::UserWarning") as calls:
        yield calls


@pytest.mark.parametrize("section", SECTIONS)
def test_recipe(section: str, tmp_path: Path, run: Forked) -> None:
    if "torch_metalmm.testing" in "".join(SECTIONS[section]) and testing.absence():
        pytest.skip(testing.absence())
    said = tmp_path / "said"
    assert run(said, str(tmp_path), SECTIONS[section]) == 0, said.read_text()

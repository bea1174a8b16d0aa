"""Every Python block of README.md and of the pages of docs runs.

The blocks of one section run one after the other in one folder and one process, each with names
of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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
_EACH = """
import linecache, sys
for i, block in enumerate(sys.argv[1:]):
    name = f"block {i + 1}"
    linecache.cache[name] = len(block), None, block.splitlines(True), name
    exec(compile(block, name, "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize("section", SECTIONS)
def test_recipe(section: str, tmp_path: Path) -> None:
    if "torch_metalmm.testing" in "".join(SECTIONS[section]) and testing.absence():
        pytest.skip(testing.absence())
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _EACH, *SECTIONS[section]]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

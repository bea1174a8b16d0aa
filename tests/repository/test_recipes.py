"""Every Python block of README.md and docs/recipes.md runs.

The blocks of one section run one after the other in one folder, each in a process of its own, as
a reader would run them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from torch_metalmm.tools import cli

# Recipes that docs/recipes.md must have: the tasks people come for.
TASKS = (
    "Run a GGUF file",
    "Quantize a Hugging Face model",
    "Load an MLX checkpoint",
    "Fine-tune with LoRA",
    "Fuse, compile, export",
)
# The blocks of adding.md are pieces of files, which test_adding carries out.
PAGES = ("README.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
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


def test_no_recipe_is_left_out() -> None:
    blocks = sum(len(blocks) for blocks in SECTIONS.values())
    assert blocks == sum((ROOT / name).read_text("utf-8").count("```python") for name in PAGES)
    assert {f"docs/recipes.md: {task}" for task in TASKS} < set(SECTIONS)
    assert "README.md: Use" in SECTIONS


def test_commands_of_the_readme_are_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    \.venv/bin/metalmm (.*?)(?:#.*)?$", text, re.M)
    assert {shlex.split(line)[0] for line in lines} >= {"generate", "quantize", "info"}
    for line in lines:
        cli._parser().parse_args(shlex.split(line))


@pytest.mark.parametrize("section", SECTIONS)
def test_recipe(section: str, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for block in SECTIONS[section]:
        command = [sys.executable, "-W", "error::UserWarning", "-c", block]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == 0, f"{block}\n{run.stderr}"

"""Every Python block of README.md and docs/recipes.md runs.

The blocks of one section run one after the other in one folder, each in a process of its own, as
a reader would run them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def sections() -> dict[str, list[str]]:
    """{"file: section": its Python blocks}."""
    found: dict[str, list[str]] = {}
    for name in ("README.md", "docs/recipes.md"):
        for part in re.split(r"^(?=#+ )", (ROOT / name).read_text(encoding="utf-8"), flags=re.M):
            title = part.partition("\n")[0].lstrip("# ")
            if blocks := re.findall(r"^```python\n(.*?)^```$", part, re.M | re.S):
                found[f"{name}: {title}"] = blocks
    return found


SECTIONS = sections()


def test_there_are_recipes() -> None:
    assert len(SECTIONS) >= 4 and any(name.startswith("README.md") for name in SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_recipe(section: str, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for block in SECTIONS[section]:
        command = [sys.executable, "-W", "error::UserWarning", "-c", block]
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == 0, f"{block}\n{run.stderr}"

"""Every Python block of README.md and of the pages of docs runs.

The blocks of one section run one after the other in one folder and one process, each with names
of its own. The processes are forks of one that has imported what other projects' packages take
long to import, and nothing of this one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
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
# Reads a folder and blocks, runs them in a fork, and prints its exit status; then the next.
_FORKS = """
import json, linecache, os, sys
import torch, transformers.models.llama.modeling_llama, transformers.generation.utils

def run(folder, blocks):
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    for i, block in enumerate(blocks):
        name = f"block {i + 1}"
        linecache.cache[name] = len(block), None, block.splitlines(True), name
        exec(compile(block, name, "exec"), {"__name__": "__main__"})

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(*json.loads(line))
        break
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Path, list[str]], int]]:
    """Runs blocks in a folder, which then has what they print in its file "said"."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _FORKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:

        def call(folder: Path, blocks: list[str]) -> int:
            print(json.dumps([str(folder), blocks]), file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield call


@pytest.mark.parametrize("section", SECTIONS)
def test_recipe(section: str, tmp_path: Path, run: Callable[[Path, list[str]], int]) -> None:
    if "torch_metalmm.testing" in "".join(SECTIONS[section]) and testing.absence():
        pytest.skip(testing.absence())
    assert run(tmp_path, SECTIONS[section]) == 0, (tmp_path / "said").read_text()

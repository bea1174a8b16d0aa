"""The house: every room is on the map."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.quick

# {folder of the root: how many levels of rooms below it are on the map}
MAPPED = {"bench": 2, "cmake": 0, "csrc": 2, "docs": 1, "metal": 2, "tests": 1, "torch_metalmm": 2}


def tracked(*folders: str) -> list[Path]:
    """The files of these folders that git knows, as paths from ROOT."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    command = ["git", "ls-files", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (ROOT / name).exists()]


def rooms_of_map(page: str) -> list[str]:
    """The folders on the map of CONTRIBUTING.md: a line each, indented below the one it is in."""
    house = page.partition("\n## The house\n")[2].partition("\n## ")[0]
    rooms, above = [], [""]
    for indent, name in re.findall(r"^ {4}((?:  )*)(\w+/) +\S", house, re.M):
        above[len(indent) // 2 + 1 :] = [above[len(indent) // 2] + name]
        rooms.append(above[-1])
    return rooms


def rooms_with_files(files: list[Path]) -> set[str]:
    """The folders of these files, and those above them, as deep as the map goes."""
    folders = {folder for file in files for folder in file.parents if folder.parts}
    return {f"{f}/" for f in folders if len(f.parts) <= MAPPED[f.parts[0]] + 1}


def test_every_room_is_on_the_map() -> None:
    """A line of CONTRIBUTING's map for each room, and no line for a room that does not exist."""
    on_map = rooms_of_map((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    there = rooms_with_files(tracked(*MAPPED))
    assert not there.difference(on_map)
    assert not [room for room in on_map if room not in there or on_map.count(room) > 1]


def test_no_two_tests_have_one_name() -> None:
    """pytest imports tests, and tests import helpers, by the name of the file alone. It takes each
    conftest by its path, and no test imports one."""
    files = [f for f in tracked("tests") if f.suffix == ".py"]
    names = Counter(f.stem for f in files if f.stem != "conftest")
    assert names and not [name for name, count in names.items() if count > 1]

"""The files and folders that the pages of the repository name exist.

The site, which has all pages, is not built with a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

ROOMS = ("bench", "cmake", "csrc", "docs", "metal", "tests", "torch_metalmm")
SUFFIXES = ("cpp", "def", "h", "json", "md", "metal", "mm", "py", "sh")
PAGES = sorted(
    str(p.relative_to(ROOT))
    for folder in (ROOT, *(ROOT / room for room in ROOMS))
    for p in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)

# A path from the root, which may have {a,b} and *; and, in backticks, the bare name of a file.
PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(ROOMS)})/[\w./*-]*(?:\{{[\w.,*-]+\}}[\w./*-]*)?")
NAME = re.compile(rf"`((?!torch\.)[\w.*-]+\.(?:{'|'.join(SUFFIXES)}))`")
NEW = re.compile(r"New file `[^`]+`")  # of an example
LINK = re.compile(r"\]\([^)\s]+\)")


def spelled_out(path: str) -> Iterator[str]:
    """The paths that one with {a,b} stands for."""
    found = re.fullmatch(r"(.*?)\{(.*?)\}(.*)", path)
    if found is None:
        yield path
        return
    for choice in found[2].split(","):
        yield from spelled_out(found[1] + choice + found[3])


def missing(page: Path, root: Path) -> list[str]:
    """What a page names that is not in the tree at `root`."""
    text = NEW.sub("", LINK.sub("]", page.read_text("utf-8")))
    paths = (one for found in PATH.findall(text) for one in spelled_out(found.rstrip(".-")))
    out = [path for path in paths if not any(root.glob(path.rstrip("/")))]
    folders = [root.glob, *((root / room).rglob for room in ROOMS)]
    out += [name for name in NAME.findall(text) if not any(any(f(name)) for f in folders)]
    return out


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    assert missing(ROOT / page, ROOT) == []

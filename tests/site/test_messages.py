"""What the page on messages quotes is what the sources say."""

from __future__ import annotations

import re
from functools import cache

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
OURS = "## What torch_metalmm says"
GAP = "…"  # in a quotation: what is filled in when it is raised, or what the quotation leaves out
LEAST, MOST = 10, 150  # letters in one piece, which can be searched for; and between two pieces
# Between literals that are one text, or, with a comma, a field and what is wrong with it.
JOINT = re.compile(r'"\s*(,?)\s*[fr]*"')


@cache
def sources() -> str:
    folders = [(ROOT / room).rglob("*") for room in ("torch_metalmm", "cmake", "csrc")]
    files = sorted(
        f for folder in folders for f in folder if f.suffix in (".py", ".h", ".cpp", ".mm")
    )
    text = "\n".join(file.read_text("utf-8") for file in files).replace('\\"', "")
    return JOINT.sub(lambda joint: ": " if joint[1] else "", text)


def quotations() -> list[str]:
    """The first column of the tables of our own messages."""
    ours = PAGE.read_text("utf-8").partition(OURS)[2]
    rows = re.findall(r"^\| (`.+?`) \|", ours, re.M)
    return [one for row in rows for one in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("quotation", quotations())
def test_a_message_of_a_page_is_one_of_the_sources(quotation: str) -> None:
    """Its pieces follow each other closely."""
    pieces = [piece for part in quotation.split(GAP) if (piece := part.strip(" :"))]
    assert max(map(len, pieces)) >= LEAST, "too short to be found by"
    gap = f".{{0,{MOST}}}?"
    assert re.search(gap.join(map(re.escape, pieces)), sources(), re.S)

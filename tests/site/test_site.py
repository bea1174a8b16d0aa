"""The site builds strictly, fetches nothing, and its blocks are run, parsed or plain output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import torch_metalmm
from bench import options
from torch_metalmm.tools import cli

sys.path.insert(0, str(ROOT / "docs"))
import hooks  # noqa: E402

PAGES = sorted(
    str(p.relative_to(ROOT))
    for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
)
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\"> ]+")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site") / "built"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    built = {str(p.relative_to(site)) for p in site.rglob("*.html")}
    wanted = {p.removeprefix("docs/").replace(".md", ".html") for p in PAGES if p[:4] == "docs"}
    assert built >= wanted | {"index.html", "contributing.html", "bench/results.html"}
    notebook = (site / "notebook.html").read_text("utf-8")
    (picture,) = re.findall(r'<img [^>]*src="([^"]+)"', notebook)
    assert "Paris" in notebook  # which an output has, and no cell
    assert (site / picture).read_bytes()[1:4] == b"PNG"
    assert '"location":"guide/gguf.html#' in (site / "search" / "search_index.json").read_text()


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    found = {p.name: FETCHED.findall(p.read_text("utf-8")) for p in site.rglob("*.html")}
    assert found and not {name: urls for name, urls in found.items() if urls}
    assert FETCHED.search('<script src="https://a.b/c.js">')


def test_the_functions_have_their_docstrings(site: Path) -> None:
    page = (site / "guide" / "api.html").read_text("utf-8")
    missing = [name for name in torch_metalmm.__all__ if f'id="torch_metalmm.{name}"' not in page]
    assert not missing
    assert "forward of five ops beside attention" in page  # of fuse_'s docstring


@pytest.mark.parametrize("page", PAGES)
def test_every_fenced_block_is_run(page: str) -> None:
    """Python by test_recipes, C++ by test_adding; what is no program is indented, not fenced."""
    text = (ROOT / page).read_text("utf-8")
    languages = {m for m in re.findall(r"^```(\w*)\n.*?^```$", text, re.M | re.S)}
    assert languages <= ({"cpp", "python"} if page == "docs/adding.md" else {"python"})


def commands(page: str) -> list[list[str]]:
    """The commands on the indented lines of a page, as words; comments and pipes are left out."""
    found = []
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    for line in re.findall(r"^ {4,}((?:\S*/)?(?:metalmm|make|python -m bench)\b .*)$", text, re.M):
        line = re.split(r" +#|\||2>", line)[0].strip()
        words = shlex.split(line)
        found.append(words)
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_of_a_page_are_commands(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        if words[0].endswith("metalmm"):
            cli._parser().parse_args(words[1:])
        elif words[0].endswith("make"):
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        else:
            options.parse(words[3:])


def test_lists_are_as_deep_as_the_site_wants_them() -> None:
    text = "1. a\n   b\n\n       code\n* c\n  d\n```\n  e\n```\nf\n    code\n"
    assert hooks.deepened(text) == (
        "1. a\n    b\n\n        code\n* c\n    d\n```\n  e\n```\nf\n    code\n"
    )

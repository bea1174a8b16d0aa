"""The sessions that pages show are those that the commands hold now."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("prompt_toolkit")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("pyte")

from transcripts import PAGES, STOP_AFTER, committed  # noqa: E402

# Ctrl-C ends an answer where it comes, and the model reads that in the next turn.
STOPPED = re.compile(r"(?<=^> Why is the sky blue\?\n)(.*?)\^C(.*?)(?=\nstopped)", re.M | re.S)
AFTER = re.compile(r"(?<=\nstopped).*?(?=\n> /save)", re.S)


def shape(session: str) -> str:
    """The session without what depends on the moment of Ctrl-C."""
    cut = STOPPED.sub("", session)
    return AFTER.sub(lambda found: re.sub(r"\d+|(?<=Faust\?\n).*", "…", found[0]), cut)


def answer(session: str) -> str:
    """What was said when Ctrl-C came."""
    found = STOPPED.search(session)
    assert found, session
    return found[1] + found[2]


def test_the_chat(tmp_path: Path) -> None:
    shown, held = committed("chat.md"), PAGES["chat.md"](str(tmp_path))
    assert shape(held) == shape(shown)
    one, other = sorted((answer(held), answer(shown)), key=len)
    assert STOP_AFTER in one and other.startswith(one.rstrip())
    assert (tmp_path / "chat.json").exists()


def test_the_server(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    assert PAGES["serve.md"](str(tmp_path)) == committed("serve.md")

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

from transcripts import PAGES, STOP_AFTER, committed, place  # noqa: E402

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


def test_another_session_is_noticed() -> None:
    """Another answer, note or command; not another moment of Ctrl-C, or what it changes."""
    shown = committed("chat.md")
    assert "stopped · prompt" in shown and "Faust" in shown
    later = shown.replace(answer(shown), f"{answer(shown)} our planet")
    later = re.sub(r"(stopped · prompt) \d+", r"\1 7", later)
    later = re.sub(r"(?<=Faust\?\n).*", "Goethe did.", later)
    assert later != shown and shape(later) == shape(shown)
    for text in ("Paris", "the system message is set", "/save", "Hamlet?", "stopped", "messages"):
        assert text in shown and shape(shown.replace(text, "x")) != shape(shown), text


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/a\.md: must have <!-- tests/site"):
        place("<!-- end of the transcript -->", "a.md")

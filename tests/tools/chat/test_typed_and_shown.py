"""What a person types and is shown, without a model: lines, history, notes, errors."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from torch_metalmm.tools.chat import reader
from torch_metalmm.tools.chat.screen import Screen
from torch_metalmm.tools.cli import main


def test_messages_of_lines() -> None:
    lines = ["a\n", "b\\\n", "c\n", '"""\n', "d\n", "\n", ' e\n"""\n', '"""f"""\n', "  \n", "g\\\n"]
    assert [*reader.from_lines(lines)] == ["a", "b\nc", "d\n\n e", "f", "", "g\\"]


@pytest.mark.parametrize(
    "text",
    ["  def f():\n    pass", "#define A \\\n  1", "\ta", "a\\\n\\\nb"],
)
def test_a_message_of_several_lines_is_what_was_pasted(text: str) -> None:
    """With its first indentation and its backslashes, alone and between quotes."""
    assert reader.message_of(f"\n{text}\n") == text
    assert reader.message_of(f'"""\n{text}\n"""') == text


def test_a_history_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user that the machine does not know, as in some containers: it is not kept."""
    from prompt_toolkit.history import InMemoryHistory

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert isinstance(reader._history(), InMemoryHistory)


@pytest.mark.parametrize("has_rich", [True, False])
def test_notes_and_errors_move_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_rich: bool
) -> None:
    """Their names come from files, and what a chat template refuses is its own text."""
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    screen = Screen()
    screen.note("a\x1b]0;title\x07 \x9b2J")
    screen.error("b\x1b[2J\nc")
    assert capsys.readouterr().err == "a\u241b]0;title\u2407 \ufffd2J\nb\u241b[2J\nc\n"


def test_a_note_on_a_terminal_is_of_one_style(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of it is markup, the name of an emoji, or highlighted as a number."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    Screen().note("[b]12 :smile: 'x'")
    assert capsys.readouterr().err == "\x1b[2m[b]12 :smile: 'x'\x1b[0m\n"


def test_an_answer_without_rich_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; a pipe gets the characters that the model wrote."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for is_terminal, wanted in ((True, "a\u241b[2J\n"), (False, "a\x1b[2J\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_it=is_terminal: is_it)
        writer = Screen().answer(str)
        writer.piece("a\x1b[2J")
        writer.end()
        assert capsys.readouterr().out == wanted


def test_errors_and_warnings_of_commands_move_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "x", "-m", "/no\x1b[2J.gguf"]) == 1
    assert "/no\u241b[2J.gguf" in capsys.readouterr().err
    from torch_metalmm.tools import cli

    def warn(_: object) -> None:
        text = warnings.formatwarning("w\x1b[2J", UserWarning, "file", 1)
        sys.stderr.write(text)

    monkeypatch.setattr(cli, "_info", warn)
    assert main(["info"]) == 0
    assert capsys.readouterr().err == "metalmm: warning: w\u241b[2J\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("not enough\n  memory"), "not enough memory"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_model_that_is_too_large_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
) -> None:
    from torch_metalmm.tools import cli

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_info", fail)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == f"metalmm: error: {said}\n"

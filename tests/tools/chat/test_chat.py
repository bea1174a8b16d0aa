"""`metalmm chat` with the real SmolLM2: through a pipe, and typed at on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from terminal import Terminal

from torch_metalmm import load_gguf
from torch_metalmm.tools import generate
from torch_metalmm.tools.chat import reader, saved, screen
from torch_metalmm.tools.cli import main

pytest.importorskip("prompt_toolkit")


@pytest.fixture(scope="module")
def real() -> Any:
    return load_gguf(generate.demo_model())


@pytest.fixture(autouse=True)
def loaded(real: Any, monkeypatch: pytest.MonkeyPatch, quiet_transformers: None) -> Iterator[None]:
    """The model is loaded once."""
    monkeypatch.setattr(generate, "load_model", lambda *_: real)
    yield


Chat = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def chat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """(lines of standard output, lines of standard error) of a chat through a pipe."""

    def run(*lines: str, flags: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
        assert main(["chat", "-n", "10", *flags]) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), err.splitlines()

    return run


def test_lines_of_a_pipe(chat: Chat, tmp_path: Path) -> None:
    """Messages and commands; the chat that was saved goes on where it was."""
    file = tmp_path / "a chat.json"
    question = "And of Italy?"
    out, err = chat(
        "/system Answer in one sentence.",
        "What is the capital of France?",
        f"/save {file}",
        question,
        "/reset",
        f"/load {file}",
        question,
        "/nonsense",
        "/exit",
        "never read",
    )
    assert "Paris" in out[0] and "Rome" in out[1] and out[1] == out[2] and len(out) == 3
    assert err[0] == "the system message is set" and err[-1].startswith(
        "/nonsense: no such command"
    )
    assert [line for line in err if "messages" in line] == [
        f"2 messages in {file}",
        f"2 messages of {file}",
    ]
    speeds = [line for line in err if "tokens/s" in line]
    assert "kept" not in speeds[0] and re.match(r"prompt \d+ tokens \(\d+ kept\), ", speeds[1])
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["system", "user", "assistant"]


def test_what_fails_costs_no_chat(chat: Chat, tmp_path: Path, real: Any) -> None:
    """A folder of nobody, half a character, no memory in the middle of an answer: a line each."""
    (tmp_path / "half.json").write_text('[{"role": "user", "content": "a\\ud800"}]')
    layer, calls = real[0].model.layers[7], []

    def full(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of\nmemory")

    hook = layer.register_forward_pre_hook(full)
    france = "What is the capital of France?"
    out, err = chat(
        "/save ~nobody-of-this-name/x",
        f"/load {tmp_path / 'half.json'}",
        "Count to ten.",
        france,
        f"/save {tmp_path / 'chat.json'}",
    )
    hook.remove()
    assert err[0] == "~nobody-of-this-name/x: no folder is known of the user after ~"
    assert err[1].endswith("half.json: messages[0] has U+D800, which is no character")
    assert err[2] == "out of memory" and "Paris" in out[-1]
    assert [m["content"] for m in saved.load(tmp_path / "chat.json")][0] == france


def test_json_and_a_first_message(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "q").write_text("What is the capital of France?")
    flags = ("--json", "--system", "Be brief.", "-f", str(tmp_path / "q"))
    out, err = chat('"""And of', 'Italy?"""', flags=flags)
    answers = [json.loads(line) for line in out]
    assert "Paris" in answers[0]["text"] and len(answers) == 2 and err == []
    kept = answers[0]["prompt_tokens"] + answers[0]["new_tokens"] - 1
    assert answers[1]["kept_tokens"] == kept


def test_a_file_is_no_command(chat: Chat, tmp_path: Path) -> None:
    """Whatever its text begins with; and what is typed is none behind a blank."""
    (tmp_path / "q").write_text("/exit is a word")
    flags = ("-f", str(tmp_path / "q"))
    file = tmp_path / "chat.json"
    _, err = chat(" /reset is another", f"/save {file}", flags=flags)
    assert err[-1] == f"4 messages in {file}"
    asked = [m["content"] for m in saved.load(file) if m["role"] == "user"]
    assert asked == ["/exit is a word", " /reset is another"]


def test_what_a_terminal_shows() -> None:
    """Calls as calls, no marks, and no control character of the model's."""
    from rich.console import Console

    out = io.StringIO()
    styled = screen.Styled(Console(file=out, markup=False, highlight=False, width=40), lambda: "")
    for piece in ("<thi", "nk>hm</think>[b]A\x1b[31m\x9b2JB", '<tool_call>{"name": "f", "arg'):
        styled.piece(piece)
    styled.piece('uments": {"x": "y\\u0007"}}</tool_call><tool_call>{"name": "g", "arg')
    styled.piece('uments": {}}</tool_call>')
    styled.end()
    assert out.getvalue() == "hm[b]A\u241b[31m\ufffd2JB→ f(x='y\\x07')\n→ g()\n\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("{}", "has no list of"),
        ('[{"role": "root", "content": ""}]', r"messages\[0\] has no role"),
        ('[{"role": "user", "content": [1]}]', r"messages\[0\]: its content is no text"),
        (
            '[{"role": "user", "content": ""}, {"role": "system", "content": ""}]',
            "must be the first",
        ),
        ('[{"role": "assistant", "content": "", "tool_calls": [1]}]', "tool_calls is no list"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_files_that_are_no_chats(tmp_path: Path, text: str, problem: str) -> None:
    """They are not loaded, and not replaced."""
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        saved.load(path)
    with pytest.raises(FileExistsError, match="is no chat; it stays as it is"):
        saved.save(path, "model", [])
    assert path.read_text() == text and [*tmp_path.iterdir()] == [path]


def typed(terminal: Terminal, text: str, wanted: str) -> str:
    """What comes after the text was typed, up to the next prompt behind what is wanted.

    A prompt before that is a line that is drawn again; what is typed before there is a prompt, is
    read by nobody.
    """
    before = len(terminal.text)
    terminal.type(text)
    found = terminal.expect(f"{wanted}.*\n>", before)
    return terminal.text[before : found.end()]


def test_answers_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is there: prompt and notes are on the terminal, what was typed in an earlier
    chat is recalled, pasted text and lines come as they are, Ctrl-D leaves.

    A chat that is all on a terminal, and Ctrl-C in an answer: tests/site/test_transcripts.py.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    reader._history().store_string("typed before")
    assert (tmp_path / "metalmm" / "chat_history").stat().st_mode & 0o077 == 0
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    into = ["/bin/sh", "-c", 'out=$1; shift; exec "$@" > "$out"', "sh", str(tmp_path / "out")]
    command = [sys.executable, "-m", "torch_metalmm", "chat", "-t", "1", "--no-fuse", "-n", "10"]
    file = tmp_path / "chat.json"
    pasted = "    #define A \\\n        1\n\\\n    b"
    with Terminal([*into, *command], env) as terminal:
        terminal.expect(r"loaded in .*8192 tokens of context.*\n>")
        before = len(terminal.text)
        terminal.type("\x1b[A")  # the arrow up
        terminal.expect("typed before", before)
        assert "Ctrl-D or /exit leaves" in typed(terminal, "\x03", "leaves")
        assert "/save FILE" in typed(terminal, "/help\r", "at once")
        typed(terminal, f"\x1b[200~{pasted}\x1b[201~\r", "tokens/s")
        typed(terminal, "What is the capital \\\rof France?\r", "tokens/s")
        after = typed(terminal, "What is the capital\x1b\rof Spain?\r", "tokens/s")
        assert re.search(r"prompt \d+ tokens \(\d+ kept\)", after)
        typed(terminal, f"/save {file}\r", "6 messages")
        terminal.type("\x04")
        assert terminal.wait() == 0
    messages = saved.load(file)
    users = [m["content"] for m in messages if m["role"] == "user"]
    lines = [f"What is the capital{place}" for place in (" \nof France?", "\nof Spain?")]
    assert users == [pasted, *lines]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert "Paris" in answers[1] and (tmp_path / "out").read_text() == "\n".join([*answers, ""])

"""Messages from a person, who types them on a terminal, or from a program, line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

QUOTES = '"""'


def is_open(text: str) -> bool:
    """Whether the message goes on in another line: a backslash at its end, or open quotes."""
    if text.startswith(QUOTES):
        return len(text) < 2 * len(QUOTES) or not text.rstrip().endswith(QUOTES)
    return text.endswith("\\")


def message_of(text: str) -> str:
    """The message without what kept it open."""
    text = text.strip()
    if text.startswith(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


def from_lines(lines: Iterable[str]) -> Iterator[str]:
    """Messages of lines; one that is open at the end is a message, too."""
    text = ""
    for line in lines:
        text += line.rstrip("\n")
        if is_open(text):
            text += "\n"
            continue
        yield message_of(text)
        text = ""
    if text:
        yield message_of(text)


def from_terminal(commands: Iterable[str], hint: str) -> Iterator[str]:
    """Messages as they are typed, until Ctrl-D. hint: what Ctrl-C in an empty line prints."""
    session = _prompt_session(commands)
    while True:
        try:
            text = session.prompt()
        except KeyboardInterrupt:  # prompt_toolkit has left the line as it was
            print(hint, file=sys.stderr)
            continue
        except EOFError:
            return
        yield message_of(text)


def _prompt_session(commands: Iterable[str]) -> Any:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def enter(event: Any) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    def newline(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("enter")(enter)
    keys.add("escape", "enter")(newline)  # Alt-Enter

    return PromptSession(
        "> ",
        history=_history(),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )


def _history() -> Any:
    """What was typed in earlier chats, for the user alone; of this one, where it cannot be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "metalmm" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except (OSError, RuntimeError):  # RuntimeError: no home is known
        return InMemoryHistory()
    return FileHistory(str(path))

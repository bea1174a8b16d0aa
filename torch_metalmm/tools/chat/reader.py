"""Messages from a person, who types them on a terminal, or from a program, line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

QUOTES = '"""'


def begun(text: str) -> str | None:
    """The text before another line of the message: it has open quotes, or a backslash at its
    end, which goes. None: the message is whole.

    Backslashes before other new lines stay: they were pasted, and belong to the text.
    """
    if text.startswith(QUOTES):
        is_open = len(text) < 2 * len(QUOTES) or not text.rstrip().endswith(QUOTES)
        return f"{text}\n" if is_open else None
    return f"{text[:-1]}\n" if text.endswith("\\") else None


def message_of(text: str) -> str:
    """The message without the quotes and blank lines around it; its first line may be indented."""
    text = text.rstrip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES).rstrip("\n")
    return text.lstrip("\n")


def from_lines(lines: Iterable[str]) -> Iterator[str]:
    """Messages of lines; one that is open at the end is a message, too."""
    text, before = "", None
    for line in lines:
        text = (before or "") + line.rstrip("\n")
        before = begun(text)
        if before is None:
            yield message_of(text)
    if before is not None:
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
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    def enter(event: Any) -> None:
        buffer = event.current_buffer
        before = begun(buffer.text)
        if before is None:
            buffer.validate_and_handle()
        elif buffer.text.startswith(QUOTES):
            buffer.insert_text("\n")
        else:
            buffer.document = Document(before)

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
        # Where answers go into a file, what is typed is shown beside the notes.
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
    )


def _history() -> Any:
    """Messages of earlier chats, for the user alone; of this one, where they cannot be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "metalmm" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except (OSError, RuntimeError):  # RuntimeError: no home is known
        return InMemoryHistory()
    return FileHistory(str(path))

"""The commands of a chat: lines that begin with a slash and a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...files.hub import expanded
from . import saved
from .conversation import Conversation
from .session import Message

_COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)


class Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[Conversation, str], str | Message]  # given the words after its name


def is_command(text: str) -> bool:
    """A path, "/etc/hosts", is none."""
    return _COMMAND.fullmatch(text) is not None


def run(text: str, chat: Conversation) -> str | Message:
    """Carry out the command: what it says, or a message that the model is to answer.

    ValueError, OSError: it says why it cannot. EOFError: the end of the chat.
    """
    found = _COMMAND.fullmatch(text)
    assert found is not None
    if found[1] in ("exit", "quit", "bye"):
        raise EOFError
    command = COMMANDS.get(f"/{found[1]}")
    if command is None:
        raise ValueError(f"/{found[1]}: no such command; /help lists them")
    return command.run(chat, (found[2] or "").strip())


def _help(_: Conversation, __: str) -> str:
    rows = [(c.usage, c.help) for c in COMMANDS.values()] + [("/exit, Ctrl-D", "leave")]
    width = max(len(usage) for usage, _ in rows)
    return "\n".join(
        [
            *(f"{usage:{width}}  {text}" for usage, text in rows),
            'A message of several lines: Alt-Enter, a \\ at the end of a line, or """ around it.',
            "A message that begins with a slash and a word: a blank before it.",
            "Ctrl-C ends an answer, whose beginning stays in the chat; twice, at once.",
        ]
    )


def _system(chat: Conversation, text: str) -> str:
    if not text:
        return chat.system if chat.system is not None else "no system message"
    chat.system = None if text == "-" else text
    return "no system message from now on" if text == "-" else "the system message is set"


def _reset(chat: Conversation, _: str) -> str:
    chat.set([])
    return "a new chat" + ("" if chat.system is None else ", with the same system message")


def _save(chat: Conversation, text: str) -> str:
    path = _path("/save", text)
    saved.save(path, chat.name, chat.everything())
    return f"{len(chat.messages)} messages in {path}"


def _load(chat: Conversation, text: str) -> str:
    path = _path("/load", text)
    chat.set(saved.load(path))
    return f"{len(chat.messages)} messages of {path}"


def _result(chat: Conversation, text: str) -> str | Message:
    awaited = chat.awaited()
    if not awaited:
        raise ValueError("/result: the last answer asks for no call")
    if not text:
        raise ValueError(f"/result needs the result of {awaited[0]}")
    message = chat.result(text)
    if len(awaited) == 1:
        return message
    chat.messages.append(message)
    return f"the result of {awaited[0]}; {awaited[1]} is awaited, too"


def _path(command: str, text: str) -> Path:
    if not text:
        raise ValueError(f"{command} needs the name of a file")
    return expanded(text)


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/system": Command("/system [TEXT]", "set the system message, - for none; or show it", _system),
    "/reset": Command("/reset", "forget the messages", _reset),
    "/result": Command("/result TEXT", "what a function gave that the model asks to call", _result),
    "/save": Command("/save FILE", "write the chat as JSON", _save),
    "/load": Command("/load FILE", "go on with a chat that was saved", _load),
}

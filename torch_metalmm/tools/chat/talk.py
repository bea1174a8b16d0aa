"""`metalmm chat`: questions and answers on a terminal, or line by line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..arguments import start
from . import reader
from .flags import add_flags, add_source, check, given_text, take_source, tools_of

if TYPE_CHECKING:
    from .conversation import Conversation
    from .screen import Screen
    from .session import Message

_HINT = "Ctrl-D or /exit leaves"


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Chat with a model. On a terminal /help lists the commands; from a pipe each line is a "
        "message or a command."
    )
    add_source(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do what the arguments say. ValueError, OSError, ImportError: it cannot be done."""
    begun = time.perf_counter()
    check(args)
    take_source(args)
    first, tools = given_text(args, None), tools_of(args)
    start(args, "prompt_toolkit", "psutil", "rich")
    from .conversation import Conversation, keeps_on
    from .loading import load, session_of
    from .screen import Screen
    from .template import Template

    with closing(Template()) as template:
        template.start()
        loaded = load(args)
        session = session_of(args, loaded, template, tools, None)
        if session.template is None:
            raise ValueError(
                f"{loaded.name} has no chat template; `metalmm generate --raw` goes on with a text"
            )
        chat = Conversation(session, loaded.name, args.system, tools)
        screen = Screen(quiet=args.json)
        seconds = time.perf_counter() - begun
        if not sys.stdin.isatty():
            _talk(chat, screen, first, args.json)
            return
        with keeps_on():
            context = f", {session.context} tokens of context" if session.context else ""
            screen.note(f"{loaded.name}, loaded in {seconds:.1f} s{context}; /help lists commands")
            _talk(chat, screen, first, args.json)


def _talk(chat: Conversation, screen: Screen, first: str | None, as_json: bool) -> None:
    from . import commands
    from .screen import one_line

    for message in _messages(first):
        try:
            if isinstance(message, str):
                is_command = commands.is_command(message)
                message = commands.run(message, chat) if is_command else _asked(message)
            if isinstance(message, str):
                screen.note(message)
            elif message["content"]:
                _answer(chat, screen, message, as_json)
        except EOFError:
            return
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:  # a second one, which came when the answer was over
            if not sys.stdin.isatty():
                raise
            screen.note("stopped; the message is not in the chat")
        except Exception as error:  # no memory, for one; it costs the message, never the chat
            screen.error(one_line(error))


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}


def _messages(first: str | None) -> Iterator[str | Message]:
    """Messages: asked, or typed and perhaps commands. first: the text of files, no command."""
    from .commands import COMMANDS

    if first is not None:
        yield _asked(first)
    if sys.stdin.isatty():
        yield from reader.from_terminal([*COMMANDS, "/exit"], _HINT)
    else:
        yield from reader.from_lines(sys.stdin)


def _answer(chat: Conversation, screen: Screen, message: Any, as_json: bool) -> None:
    from .report import as_json as object_of
    from .report import line

    hidden = chat.hidden
    writer = screen.answer(lambda: chat.session.prompt)
    answer = chat.ask(message, writer.piece)
    writer.end()
    if chat.hidden > hidden:
        screen.note(f"the context is full: the first {chat.hidden} messages are no longer seen")
    if as_json:
        screen.print(object_of(answer))
        return
    reason = answer.result.reason
    stopped = {"interrupted": "stopped · ", "length": "cut at the limit · "}.get(reason, "")
    if reason == "interrupted" and not answer.text:
        stopped = "stopped before a word; the message is not in the chat"
    screen.note(stopped + line(answer))
    for name in chat.awaited()[:1]:
        screen.note(f"/result TEXT gives it the result of {name}")

"""`metalmm generate`: one answer."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing

from ..arguments import start
from .flags import add_flags, check, given_text, tools_of

_MOST_NEW = 256


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Answer a prompt, printing the text as it is made."
    parser.add_argument(
        "prompt",
        nargs="?",
        help="- reads it from standard input, as does no prompt at all where that is a pipe",
    )
    add_flags(parser)
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do what the arguments say. ValueError, OSError, ImportError: it cannot be done."""
    begun = time.perf_counter()
    check(args)
    if args.fuse is None:
        args.fuse = args.device != "cpu"  # one answer on a CPU seldom repays what it takes
    for flag in ("system", "tools"):
        if args.raw and getattr(args, flag) is not None:
            raise ValueError(f"--{flag} is for the chat template, which --raw does not apply")
    prompt = args.prompt
    if prompt is None and not args.file and not sys.stdin.isatty():
        prompt = "-"
    text, tools = given_text(args, prompt), tools_of(args)
    if text is None:
        raise ValueError("no prompt; give one, a file of it with -f, or - for standard input")
    start(args, *(() if args.raw else ("psutil",)))
    from .loading import load, session_of
    from .report import as_json, line
    from .screen import Screen
    from .template import Template

    with closing(Template()) as template:
        if not args.raw:
            template.start()
        session = session_of(args, load(args), None if args.raw else template, tools, _MOST_NEW)
        screen = Screen(quiet=args.json)
        writer = screen.answer(lambda: session.prompt)
        if session.template is not None:
            answer = session.answer(opening(args, text), writer.piece, tools)
        elif args.system is not None or tools is not None:
            raise ValueError("--system, --tools: the model has no chat template")
        else:
            answer = session.complete(text, writer.piece)
        writer.end()
    loading = answer.begun - begun
    if args.json:
        screen.print(as_json(answer, loading))
    else:
        screen.note(line(answer, loading))
    if answer.result.reason == "interrupted":
        raise KeyboardInterrupt


def opening(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """The messages of a chat that begins with the text."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]

"""The output of commands: answers as they come, on a terminal or into a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..marks import CALL, TEXT, THOUGHT, Splitter, calls_of

_DIM, _CALL, _ERROR = "dim", "cyan", "red"
# A model's text moves no cursor and sets no title of a terminal, whatever is in it.
_HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_HARMLESS |= {code: 0xFFFD for code in range(0x7F, 0xA0)}


def harmless(text: str) -> str:
    """The text, with pictures in place of control characters."""
    return text.translate(_HARMLESS)


def one_line(error: BaseException) -> str:
    """The error's message, harmless; transformers' run over several lines, MemoryError has none."""
    return harmless(" ".join(str(error).split())) or type(error).__name__


class Screen:
    """Answers on standard output; statistics, notes and errors on standard error.

    Where the output is no terminal, the answer's characters are written as they are, marks of
    thoughts and calls included. quiet: no answers, which are printed as JSON.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._out = _console(sys.stdout) if sys.stdout.isatty() else None
        self._err = _console(sys.stderr)

    def answer(self, prompt: Callable[[], str]) -> Writer:
        """The writer of an answer; prompt(): the text that it answers, once it begins."""
        if self._quiet:
            return Writer(lambda _: None)
        if self._out is not None:
            return Styled(self._out, prompt)
        is_shown = sys.stdout.isatty()  # without rich
        return Writer(lambda text: _write(harmless(text) if is_shown else text))

    def print(self, text: str) -> None:
        """On standard output, as it is."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        self._say(text, _DIM)

    def error(self, text: str) -> None:
        self._say(text, _ERROR)

    def _say(self, text: str, style: str) -> None:
        """Names in it may be those of a file, and what a template refuses is the file's text."""
        text = harmless(text)
        sys.stdout.flush()
        if self._err is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._err.print(text, style=style, soft_wrap=True)


def _console(file: Any) -> Any:
    """rich's, None without it."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=file, highlight=False, markup=False, emoji=False)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Writer:
    """An answer as it is."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def piece(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        self._write("\n")


class Styled(Writer):
    """An answer on a terminal: thoughts dim, calls as calls, no control characters."""

    def __init__(self, console: Any, prompt: Callable[[], str]) -> None:
        self._console, self._prompt = console, prompt
        self._splitter: Splitter | None = None

    def piece(self, text: str) -> None:
        if self._splitter is None:
            self._splitter = Splitter(self._prompt())
        for kind, part in self._splitter.feed(text):
            self._show(kind, part)

    def end(self) -> None:
        if self._splitter is not None:
            for kind, part in self._splitter.end():
                self._show(kind, part)
        self._console.print()

    def _show(self, kind: str, text: str) -> None:
        if kind != CALL:
            style = {TEXT: None, THOUGHT: _DIM}[kind]
            self._console.print(harmless(text), style=style, end="", soft_wrap=True)
            return
        calls = calls_of(text)
        for line in [text.strip()] if calls is None else map(shown, calls):
            self._console.print(harmless(f"→ {line}"), style=_CALL, soft_wrap=True)


def shown(call: dict[str, Any]) -> str:
    """A call as it would be written."""
    return f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"

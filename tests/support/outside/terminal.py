"""A command on a terminal: a pty whose other end is typed at and read."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?>]*[A-Za-z]|[=>]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
# It answers no question about its cursor.
_TERMINAL = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
_SECONDS = 120.0  # a model loads, on a machine that does other work, too


class Terminal:
    """The command in a process of its own, whose terminal this is; a context manager."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        import pty

        self.raw = ""
        self._is_over = False  # the other end is closed
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.execve(command[0], list(command), {**env, **_TERMINAL})

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was printed, without colours and cursor movements."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait for the pattern in the text behind so many characters. AssertionError: in vain."""
        end = time.monotonic() + _SECONDS
        while (found := re.compile(pattern, re.S).search(self.text, after)) is None:
            is_late = time.monotonic() > end or self._is_over
            assert not is_late, f"no {pattern!r} in {self.text[after:]!r}"
            self._read()
        return found

    def wait(self) -> int:
        """The exit status, once the command has ended."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            self._read()
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"still running: {self.text!r}")

    def _read(self) -> None:
        if not select.select([self._master], [], [], 0.1)[0]:
            return
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # Linux' word for it
            data = b""
        self.raw += data.decode(errors="replace")
        self._is_over = not data

"""Calls of a script, each in a process of its own that has what the script imports.

The processes are forks of one; on a Mac, where a forked process may not use Apple's frameworks,
each starts anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORKS = """
import json, os, sys

def answer(said, given):
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    try:
        run(*given)
    except SystemExit as end:
        leave(end.code or 0)
    leave(0)

def leave(status):
    # An interpreter that has imported torch takes a second to end: it visits all that it has.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        answer(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
leave(0)
"""
_ANEW = "import json, sys\nrun(*json.loads(sys.stdin.read()))\n"


class Forked:
    """Runs run(...) of the script; what it prints is appended to a file."""

    def __init__(self, command: list[str], script: str, env: Mapping[str, str]) -> None:
        self._command, self._script, self._env = command, script, env
        self._server: subprocess.Popen[str] | None = None

    def __call__(self, said: Path, *given: Any) -> int:
        """The exit status: 0 if it ended as it should, of a signal its number, negative."""
        if sys.platform == "darwin":
            with said.open("a") as file:
                command = [*self._command, self._script + _ANEW]
                streams: Any = {"stdout": file, "stderr": file, "input": json.dumps(given)}
                return subprocess.run(command, env=self._env, text=True, **streams).returncode
        if self._server is None:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = [*self._command, self._script + _FORKS]
            self._server = subprocess.Popen(command, env=self._env, **pipes)
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps([str(said), given]), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


@contextmanager
def forked(script: str, env: Mapping[str, str], *options: str) -> Iterator[Forked]:
    """options: of Python. env: beside the variables of this process, of which "" takes one away."""
    own = {k: v for k, v in (os.environ | dict(env)).items() if v}
    calls = Forked([sys.executable, *options, "-c"], script, own)
    try:
        yield calls
    finally:
        calls.close()

"""`metalmm doctor`: what this machine runs, and whether each engine computes what it should.

One text to paste into a report: versions, the devices, then a line per check. The checks run in
processes of their own (child.py): a check that does not end is killed after its time limit, a check
that takes its process down is reported with how it ended, and the others go on.
"""

from __future__ import annotations

import faulthandler
import json
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...engines import DEVICES, absence, check_device
from ..info import versions

# Seconds of a check, its process's start and the compilation of its kernels included.
LIMIT = 120.0
_CHILD = (sys.executable, "-m", "torch_metalmm.tools.doctor.child")
_LAST_LINES = 25  # output of a process before it died or was killed


@dataclass(frozen=True)
class Result:
    """A piece of the report, to be printed as it comes, and whether all is well."""

    text: str
    ok: bool = True
    end: str = "\n"


def examine(
    device: str | None = None, limit: float = LIMIT, child: Sequence[str] = _CHILD
) -> Iterator[Result]:
    """The report piece by piece, as it is made; of one device ("mps"), or of all that run here.

    A check's name comes before it runs. limit: the seconds after which it counts as hanging.
    child: the command of the process that runs checks, before the device and its options.
    ValueError: the device is none of DEVICES, or the ops do not run on it.
    """
    if device is not None:
        check_device(device)
    yield from map(Result, versions())
    here = []
    for name in DEVICES:
        why = absence(name, ask_metal=False)
        yield Result(f"{name:5} {why or 'available'}")
        if not why and device in (None, name):
            here.append(name)
    for name in here:
        yield Result(f"\n{name}")
        failed = False
        for result, check in supervise([*child, name], limit):
            yield result
            if not result.ok and not failed:
                failed = True
                yield Result(f"      reproduce: {reproduction(name, check)}")


def reproduction(device: str, check: str) -> str:
    """The command that runs one check in its own process, where a debugger reaches it."""
    command = [sys.executable, "-m", "torch_metalmm", "doctor", "--device", device]
    return shlex.join([*command, "--check", check])


def supervise(command: Sequence[str], limit: float) -> Iterator[tuple[Result, str]]:
    """Runs `command --skip N`, which announces steps and their results on stdout, until it says
    that all N are done: (what to print, the step it is about).

    A process that hangs or dies is replaced by another that goes on with the step after. So is a
    process that ends early by itself, for a failed step may leave it in no state to go on.
    """
    done, is_complete = 0, False
    while not is_complete:
        before, current = done, ""
        process = _Process([*command, "--skip", str(done)])
        try:
            for message in process.messages(limit):
                if "start" in message:
                    current = message["start"]
                    yield Result(f"{current:36} ", end=""), current
                elif "text" in message:
                    yield Result(message["text"], message["ok"]), current
                    done, current = done + 1, ""
                else:
                    is_complete = True
        except _Gone as gone:
            yield (
                Result(str(gone) if current else f"the process of the checks: {gone}", False),
                (current or "device"),
            )
            done += bool(current)
        finally:
            process.kill()
        if done == before:
            return


class _Gone(Exception):
    """A process that hangs or died; the message is the verdict."""


class _Process:
    """A child whose stdout is read as JSON lines."""

    def __init__(self, command: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # see kill
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()  # "" at the end
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def messages(self, limit: float) -> Iterator[dict[str, Any]]:
        """The child's messages; _Gone: none for `limit` seconds, or an exit status other than 0."""
        while True:
            try:
                line = self._lines.get(timeout=limit)
            except queue.Empty:
                self._ask_where()
                raise _Gone(f"HANGS no end after {limit:g} s; killed{self._last_lines()}") from None
            if not line:
                break
            yield json.loads(line)
        status = self._child.wait()
        if status < 0:
            name = signal.Signals(-status).name
            raise _Gone(f"DIES  by signal {-status}, {name}{self._last_lines()}")
        if status:
            raise _Gone(f"DIES  with exit status {status}{self._last_lines()}")

    def _ask_where(self) -> None:
        """Makes a hanging child write its stack to stderr (serve() registered the signal)."""
        if hasattr(faulthandler, "register"):
            self._child.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=1)

    def _last_lines(self) -> str:
        self._said.seek(0)
        lines = self._said.read().splitlines()[-_LAST_LINES:]
        return "".join(f"\n      {line}" for line in lines)

    def kill(self) -> None:
        """End the child; a child that the kernel does not let go of is left behind."""
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=10)
        self._said.close()

"""`metalmm serve` in a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from places import ROOT

KEY = "a-key-of-tests"


class Served(NamedTuple):
    name: str  # of the model
    url: str  # http://127.0.0.1:PORT
    pid: int

    def ask(
        self, path: str, body: Any = None, key: str = KEY, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON) of a request; a body, JSON or bytes, makes it a POST."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        for name, value in headers.items():
            given[name.replace("_", "-")] = value
        request = urllib.request.Request(self.url + path, data, given)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, dict(answer.headers), json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read()
            told = json.loads(text) if text.startswith(b"{") else text.decode()
            return error.code, dict(error.headers), told


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """A server of these flags, which ends at the end. AssertionError: it did not start."""
    command = [sys.executable, "-m", "torch_metalmm.tools.cli", "serve", "--port", "0", *flags]
    env = os.environ | {"METALMM_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:  # progress bars may come first
            said += line
            found = re.fullmatch(r"(.+): (http://.+:\d+)/v1\n", line.rpartition("\r")[2])
            if found is not None:
                break
        else:
            raise AssertionError(said)
        yield Served(found[1], found[2], process.pid)
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()

"""A few of the files of tests/fuzz_gguf.py."""

from __future__ import annotations

import json
import subprocess
import sys

import fuzz_gguf


def test_damaged_files_are_refused_or_read_as_the_gguf_package_does() -> None:
    command = [sys.executable, fuzz_gguf.__file__, "--count=200", "--load-every=10", "--here"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert sum(found.values()) == 200
    assert found.keys() == {"refused", "read", "read, not loaded", "read and loaded"}

"""A few of the files of tests/fuzz_gguf.py."""

from __future__ import annotations

import subprocess
import sys

import fuzz_gguf


def test_damaged_files_are_refused_or_read_as_the_gguf_package_does() -> None:
    command = [sys.executable, fuzz_gguf.__file__, "--count=200", "--load-every=10"]
    run = subprocess.run(command, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert run.returncode == 0 and "200 files" in run.stdout
    assert "'refused'" in run.stdout and "'read'" in run.stdout and "loaded'" in run.stdout

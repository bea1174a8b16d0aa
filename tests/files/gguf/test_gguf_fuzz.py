"""A few of the files of tests/fuzz_gguf.py."""

from __future__ import annotations

from pathlib import Path

import fuzz_gguf


def test_damaged_files_are_refused_or_read_as_the_gguf_package_does(tmp_path: Path) -> None:
    found = fuzz_gguf.run(seed=0, first=0, last=200, load_every=10, folder=tmp_path)
    assert sum(found.values()) == 200
    assert found.keys() == {"refused", "read", "read, not loaded", "read and loaded"}

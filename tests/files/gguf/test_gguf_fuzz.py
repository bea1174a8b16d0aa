"""A few of the files of `tests/fuzz.py gguf`."""

from __future__ import annotations

from pathlib import Path

from damaged_gguf import checks


def test_damaged_files_are_refused_or_read_as_the_gguf_package_does(tmp_path: Path) -> None:
    found = {*map(checks(tmp_path), range(200))}
    assert found == {"refused", "read", "read, not loaded", "read and loaded"}

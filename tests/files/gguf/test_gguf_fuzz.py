"""A few of the files of tests/fuzz_gguf.py, and that the fuzz notices what it looks for."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fuzz_gguf
import gguf_bytes as raw
import pytest
from fuzz_gguf import check_agreement
from gguf import GGUFReader

from torch_metalmm.files.gguf.file import GgufFile, TensorEntry

pytestmark = pytest.mark.filterwarnings("error")


def test_damaged_files_are_refused_or_read_as_the_gguf_package_does() -> None:
    command = [sys.executable, fuzz_gguf.__file__, "--count=200", "--load-every=10"]
    run = subprocess.run(command, capture_output=True, text=True)
    print(run.stdout, run.stderr)
    assert run.returncode == 0 and "200 files" in run.stdout
    assert "'refused'" in run.stdout and "'read'" in run.stdout and "loaded'" in run.stdout


def test_the_same_number_is_the_same_file(tmp_path: Path) -> None:
    parts = fuzz_gguf.good_parts(tmp_path)
    assert raw.content(*parts) == (tmp_path / "good.gguf").read_bytes()
    files = [fuzz_gguf.damaged(0, number, parts) for number in (1, 2, 1)]
    assert files[0] == files[2] != files[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 32},
        {"shape": (8, 2)},
        {"format": "f16"},
        {"nbytes": 128},
    ],
)
def test_a_reader_that_differs_is_noticed(tmp_path: Path, wrong: dict[str, object]) -> None:
    tensors = [raw.tensor("a", [16]), raw.tensor("b", [16], offset=64)]
    path = raw.write(
        tmp_path / "x.gguf", [raw.value("key", raw.U32, 7)], tensors, bytes(range(128))
    )
    file, size = GgufFile(path), path.stat().st_size
    check_agreement(file, GGUFReader(path), size, 32)
    entry: TensorEntry = replace(file.tensors["a"], **wrong)  # type: ignore[arg-type]
    file.tensors["a"] = entry
    with pytest.raises(AssertionError):
        check_agreement(file, GGUFReader(path), size, 32)
    file = GgufFile(path)
    file.metadata["key"] = 8
    with pytest.raises(AssertionError):
        check_agreement(file, GGUFReader(path), size, 32)


NOTICED = """
import sys, fuzz_gguf
from fuzz_gguf import Hang, limited
fuzz_gguf.SECONDS = 0.05
try:
    with limited(0):
        while True:
            pass
except Hang:
    print("hang")
fuzz_gguf.SECONDS = 60
try:
    with limited(1000):
        assert b"x" * (1 << 26)
except MemoryError as error:
    print(error)
with limited(1 << 26):
    assert b"x" * (1 << 26)
"""


def test_a_hang_and_growth_are_noticed() -> None:
    """In a process of its own, as the fuzz runs: pages that another test freed hide growth."""
    command = [sys.executable, "-c", NOTICED]
    folder = Path(fuzz_gguf.__file__).parent
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    expected = "hang\n"
    if sys.platform == "linux":
        expected += r"\d{8} bytes of memory for a file of 1000\n"
    assert re.fullmatch(expected, said)

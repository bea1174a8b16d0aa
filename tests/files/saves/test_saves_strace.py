"""A save in a process of its own, killed by the kernel at every call that changes a file."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from backends import CASES
from test_saves import KINDS, check_reads, contents, leftovers, models, prepared

__all__ = ["models"]  # the fixture

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="strace is Linux's"),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

# "?" for those that a machine's kernel has not.
CALLS = (
    *("write", "pwrite64", "fsync", "ftruncate", "?rename", "renameat", "renameat2"),
    *("?unlink", "unlinkat", "?link", "linkat", "?symlink", "symlinkat", "?mkdir", "mkdirat"),
    *("?rmdir", "?chmod", "fchmodat"),
)
# "to shards" has files that are replaced, added and removed. test_saves.py has every change that
# Python makes; others are safetensors'.
NAMES = ["to shards"]
STEP = 4
if CASES == "all":
    NAMES += ["save_packed", "save_pretrained", "save_mlx", "quantize"]
    STEP = 1


def traced_save(kind: Any, new: Any, folder: Path, *options: str) -> int:
    """The status that the save into the folder ended with, under strace."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)  # until strace is there
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        transformers.utils.logging.disable_progress_bar()  # its locks do not survive a fork
        kind.new(*new, folder)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    tracer = subprocess.Popen(
        ["strace", "-f", *options, "-p", str(child)], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.skip(f"strace: {said}")
    os.kill(child, signal.SIGCONT)
    status = os.waitpid(child, 0)[1]
    tracer.communicate()
    assert status in (0, signal.SIGKILL)
    return status


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_every_system_call(name: str, models: list[Any], tmp_path: Path) -> None:
    kind = KINDS[name]
    start = prepared(tmp_path / "start", kind, models, full=True)
    done, log = Path(shutil.copytree(start, tmp_path / "done")), tmp_path / "calls"
    assert traced_save(kind, models[1], done, f"-o{log}", f"--trace={','.join(CALLS)}") == 0
    counts = Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.M))
    assert {"write", "fsync", "unlinkat"} <= counts.keys()
    old, new = contents(start), contents(done)
    check_reads(kind, done, models[1][0])
    for call, count in counts.items():
        outcomes = []
        for at in range(1, count + 1, STEP):
            folder = Path(shutil.copytree(start, tmp_path / "killed"))
            inject = f"--inject={call}:signal=KILL:when={at}"
            options = f"-o{os.devnull}", f"--trace={call}", inject
            killed = traced_save(kind, models[1], folder, *options) == signal.SIGKILL
            assert killed or at == count
            seen = contents(folder)
            assert seen in (old, new), f"a mixture at {call} {at}"
            if at % 20 == 1:
                check_reads(kind, folder, models[seen == new][0])
                kind.new(*models[1], folder)
                assert contents(folder) == new and leftovers(folder) == []
            shutil.rmtree(folder)
            outcomes.append(seen == new)
        assert outcomes == sorted(outcomes)
        print(name, call, f"{len(outcomes)}, old {outcomes.count(False)}")

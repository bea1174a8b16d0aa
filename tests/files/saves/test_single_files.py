"""Every save of one file, killed at every change of the file system, and on a disk without room."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Killed, faults
from gguf_files import load_quietly, random_model
from hf_models import random_model as tiny_model
from test_saves import points

from torch_metalmm import save_gguf
from torch_metalmm.files.imatrix import Entry, Imatrix, write_imatrix
from torch_metalmm.files.staging import replaced, settle
from torch_metalmm.hf.cache import PackedCache
from torch_metalmm.tools.chat import saved

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # a killed save closes no file

Save = Callable[[Path, int], object]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Save]:
    """What writes a file of each kind, of the old (0) or the new (1) content."""
    path = random_model(tmp_path_factory.mktemp("m") / "m.gguf", "llama")
    model, tokenizer = load_quietly(path)[:2]

    def gguf(path: Path, which: int) -> None:
        with torch.no_grad():
            model.model.norm.weight.fill_(which)
        save_gguf(model, tokenizer, path, replace=True)

    def imatrix(path: Path, which: int) -> None:
        entries = {
            "blk.0.ffn_up.weight": Entry(np.full((1, 40_000), which, np.float32), np.ones(1))
        }
        write_imatrix(path, Imatrix(entries, ["text"], 1, 512))

    caches = [PackedCache(tiny_model("llama", num_hidden_layers=1).config, "f32") for _ in "01"]
    for cache in caches:
        cache.update(*torch.randn(2, 1, 2, 200, 32), 0)

    def chat(path: Path, which: int) -> None:
        saved.save(path, "m", [{"role": "user", "content": str(which) * 200_000}])

    return {
        "m.gguf": gguf,
        "imatrix.gguf": imatrix,
        "imatrix.dat": imatrix,
        "cache": lambda path, which: caches[which].save(path),
        "chat.json": chat,
    }


NAMES = ("m.gguf", "imatrix.gguf", "imatrix.dat", "cache", "chat.json")


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_every_change(name: str, saves: dict[str, Save], tmp_path: Path) -> None:
    """The file is the old or the new one, and the next save leaves nothing beside it."""
    path, save = tmp_path / name, saves[name]
    save(path, 1)
    new = path.read_bytes()
    save(path, 0)
    old = path.read_bytes()
    with faults(None) as counted:
        save(path, 1)
    assert "os.rename" in counted.seen
    outcomes = []
    for k in points(len(counted.seen)):
        save(path, 0)
        with faults(k), pytest.raises(Killed):
            save(path, 1)
        seen = path.read_bytes()
        assert seen in (old, new), f"a mixture after {k} changes, before {counted.seen[k]}"
        outcomes.append(seen == new)
        save(path, 1)
        assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == new
    assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[0]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of more bytes are refused by the system, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", (1000, 100_000))
@pytest.mark.parametrize("name", NAMES)
def test_no_room(name: str, size: int, saves: dict[str, Save], tmp_path: Path) -> None:
    """The error has the path and the system's number; the old file stays, alone."""
    path, save = tmp_path / name, saves[name]
    save(path, 0)
    old = path.read_bytes()
    with room_for(size), pytest.raises(OSError, match=f"{path}: File too large") as raised:
        save(path, 1)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == old
    del raised
    gc.collect()  # a file that is still open warns, which is an error here


def test_a_save_under_way_stays(tmp_path: Path) -> None:
    """Another one in the folder, and what removes leftovers of killed ones, leave it alone."""
    begun, go = threading.Event(), threading.Event()

    def write() -> None:
        with replaced(tmp_path / "slow") as new:
            new.write_text("whole")
            begun.set()
            go.wait(60)

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(60)
    with replaced(tmp_path / "other") as new:
        new.write_text("other")
    settle(tmp_path)
    go.set()
    thread.join()
    assert (tmp_path / "slow").read_text() == "whole"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["other", "slow"]

"""A process that is killed, or a disk that is full, at the k-th change of the file system."""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import safetensors.torch

# Python's audit events of changes; os.fsync, writes and safetensors' own file have no event.
_CHANGES = {"os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.rmdir"}
_GROWTH = {"open", "write", "fsync", "os.link", "os.symlink", "os.mkdir", "save_file"}


class Killed(BaseException):
    """The process is gone: whatever still runs, cleaning up included, changes nothing more."""


class Faults:
    """Counts changes; the at-th and all later ones raise instead.

    full: growing the disk raises ENOSPC, and what shrinks or renames works. Else Killed is raised.
    """

    def __init__(self, at: int | None, full: bool) -> None:
        self.at, self.full = at, full
        self.seen: list[str] = []

    def change(self, name: str) -> None:
        if self.reached(name):
            self.fail()

    def reached(self, name: str) -> bool:
        if self.full and name not in _GROWTH:
            return False
        self.seen.append(name)
        return self.at is not None and len(self.seen) > self.at

    def fail(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise Killed


class _File:
    """A file whose writes are changes: a write that fails has written half."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> Any:
        if self._faults.reached("write"):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._faults.fail()
        return self._file.write(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_active: list[Faults] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event in _CHANGES:
        _active[-1].change(event)
    elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _active[-1].change("open")


_hooks: list[Any] = []  # a hook cannot be removed: one for the process


@contextmanager
def faults(at: int | None, full: bool = False) -> Iterator[Faults]:
    """Faults while the block runs; at = None only counts."""
    if not _hooks:
        _hooks.append(_audit)
        sys.addaudithook(_audit)
    here = Faults(at, full)
    fsync, open_, serialize = os.fsync, builtins.open, safetensors.torch.serialize_file

    def counted_fsync(descriptor: int) -> None:
        here.change("fsync")
        fsync(descriptor)

    def counted_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        made = open_(file, mode, *args, **options)
        return _File(made, here) if set(mode) & set("wxa+") else made

    def counted_serialize(tensors: Any, file: Any, **options: Any) -> None:
        if here.reached("save_file"):
            serialize(tensors, file, **options)
            os.truncate(file, os.path.getsize(file) // 2)
            if here.full:  # as safetensors says it
                text = f"I/O error: No space left on device (os error {errno.ENOSPC})"
                raise safetensors.SafetensorError(text)
            here.fail()
        serialize(tensors, file, **options)

    _active.append(here)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", counted_fsync)
            patch.setattr(builtins, "open", counted_open)
            patch.setattr(io, "open", counted_open)
            patch.setattr(safetensors.torch, "serialize_file", counted_serialize)
            yield here
    finally:
        _active.pop()

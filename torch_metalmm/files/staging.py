"""Saves that are complete or leave the old files, at whatever point they are killed.

A model is many files, and one rename changes one name. So the names go through one link while
they change:

    folder/.saving-x/new/config.json       what is saved, complete before anything else happens
    folder/.saving-x/old/config.json       a hard link to what it replaces
    folder/.saving-x/current -> old        later -> new
    folder/config.json -> .saving-x/current/config.json

1. Everything is written below new/.
2. Every name that will change becomes a link through `current`; the name reads as before.
3. `current` is changed from old to new by one rename: all names change at once, for any reader.
4. Every link becomes the file behind it; the name reads as before.

A process killed in 1 or 2 leaves the old model, a process killed later the new one, for readers
that know nothing of these links (transformers, mlx-lm). The next save settles: it does 4 for the
links that it finds and removes the rest. A name that only one of the two models has is a dangling
link meanwhile. Before step 1 the save locks the folder and settles what a killed one left.

Rejected: exchanging the whole folder with another one (renameat2, renamex_np), because it takes
.git, README.md and a shell's current folder along, needs a writable parent and fails on mount
points; a journal that loaders replay, because other libraries would load a mixture.

One file alone is written in a folder of its own, folder/.writing-x/, which its process locks; one
rename puts it in its place. A folder whose lock nobody has is a killed save's, and the next save
removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = ".saving-"
_ALONE = ".writing-"  # whose lock is its own: saves of several files go on in one folder


@contextmanager
def staged(target: Path, obsolete: Callable[[set[str]], set[str]]) -> Iterator[Path]:
    """An empty folder whose files replace those of `target` together, if nothing is raised.

    Names are relative paths: files may be in folders. Files of no such name stay, except those of
    obsolete(names of the new files). Leftovers of killed saves are removed before.
    OSError that names target: another process saves there, the disk is full, a name is a folder.
    """
    with _errors_name(target), _locked(target):
        _settle(target)
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target))
        try:
            work.chmod(stat.S_IMODE(target.stat().st_mode))  # others read through it meanwhile
            (work / "new").mkdir()
            yield work / "new"
            names = _names(work / "new")
            _check_places(target, names)
            _switch(target, work, sorted(names | obsolete(names)))
        finally:
            _settle(target)


def settle(target: Path) -> None:
    """Finish or undo what killed saves left: the folder reads as before. OSError as staged."""
    with _errors_name(target), _locked(target):
        _settle(target)


def is_staging(folder: str | os.PathLike[str]) -> bool:
    """Whether staged() made the folder."""
    return Path(folder).parent.name.startswith(_PREFIX)


def cannot_write(target: Path, error: OSError, kind: str = "to the folder ") -> OSError:
    """The error with the folder, or for kind="" the file, in its message; type and errno stay."""
    named = type(error)(f"cannot write {kind}{target}: {error.strerror}")
    named.errno = error.errno
    return named


def check_writable(folder: Path) -> None:
    """OSError: no file can be made in the folder.

    access() does not know of read-only mounts for a superuser.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise cannot_write(folder, error) from None


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file of the same name to write, which takes the place of `path` once it is whole.

    The file is on the disk before. Files that killed saves left in the folder are removed.
    OSError that names `path`: the disk is full, the folder cannot be written.
    """
    with _errors_name(path, kind=""):
        _sweep(path.parent)
        work, lock = _own_folder(path.parent)
        try:
            yield work / path.name
            _sync(work / path.name)
            os.replace(work / path.name, path)
            _sync(path.parent)
        finally:
            os.close(lock)
            shutil.rmtree(work, ignore_errors=True)


def _own_folder(parent: Path) -> tuple[Path, int]:
    """An empty folder for one file, and the descriptor that has its lock."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=_ALONE, dir=parent))
        lock = os.open(work, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: nobody takes it for a killed one's
            fcntl.flock(lock, fcntl.LOCK_EX)
        if work.exists():  # else a sweep came before the lock
            return work, lock
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders of single files whose processes are gone."""
    for work in parent.glob(f"{_ALONE}*"):
        with suppress(OSError):  # the folder is gone, is written, or cannot be locked
            lock = os.open(work, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work, ignore_errors=True)
            finally:
                os.close(lock)


def _settle(target: Path) -> None:
    _sweep(target)
    for work in target.glob(f"{_PREFIX}*"):
        names = sorted(_names(work / "new") | _names(work / "old"))
        for name in names:
            place = target / name
            if place.is_symlink() and os.readlink(place) == _link(target, work, name):
                if os.path.lexists(work / "current" / name):
                    os.replace(work / "current" / name, place)
                else:
                    place.unlink()
        _sync_folders(target, names)
        for folder in _folders(names):
            with suppress(OSError):  # the folder has other files
                (target / folder).rmdir()
        shutil.rmtree(work, ignore_errors=True)


def _switch(target: Path, work: Path, names: list[str]) -> None:
    (work / "old").mkdir()
    for name in names:
        if os.path.lexists(target / name):
            _keep(target / name, work / "old" / name)
    try:
        os.symlink("old", work / "current")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise OSError(error.errno, "its file system has no symbolic links") from None
        raise
    _sync_tree(work)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _put_link(_link(target, work, name), target / name, work)
    _sync_folders(target, names)
    _put_link("new", work / "current", work)
    _sync(work)


def _put_link(text: str, place: Path, work: Path) -> None:
    os.symlink(text, work / "link")
    os.replace(work / "link", place)


def _link(target: Path, work: Path, name: str) -> str:
    return os.path.relpath(work / "current" / name, (target / name).parent)


def _keep(file: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():  # as in Hugging Face's cache; its text is relative to another folder
        os.symlink(os.path.realpath(file), kept)
        return
    try:
        os.link(file, kept)
    except OSError:  # a file system without hard links
        shutil.copy2(file, kept)


def _names(folder: Path) -> set[str]:
    """The files below the folder, links included."""
    files = (f for f in folder.rglob("*") if f.is_symlink() or not f.is_dir())
    return {str(f.relative_to(folder)) for f in files}


def _folders(names: Iterable[str]) -> list[Path]:
    """The folders, below the target, that the names are in; inner ones first."""
    inner = {folder for name in names for folder in Path(name).parents} - {Path(".")}
    return sorted(inner, key=lambda folder: (-len(folder.parts), folder))


def _check_places(target: Path, names: set[str]) -> None:
    for folder in _folders(names):
        place = target / folder
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is no folder")
    for name in names:
        place = target / name
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(errno.EISDIR, f"{place} is a folder")


def _sync_tree(work: Path) -> None:
    """Wait until everything below the folder is on the disk."""
    for folder, _, files in os.walk(work):
        for file in files:
            if not os.path.islink(os.path.join(folder, file)):
                _sync(Path(folder, file))
        _sync(Path(folder))


def _sync_folders(target: Path, names: Iterable[str]) -> None:
    for folder in (target, *(target / folder for folder in _folders(names))):
        if folder.is_dir():
            _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One save at a time; the lock of a killed process is gone with it."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EAGAIN, "another process is saving there") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _errors_name(target: Path, kind: str = "to the folder ") -> Iterator[None]:
    """OSErrors of writing name what cannot_write() names; safetensors' errors become such."""
    try:
        yield
    except ConnectionError:  # an upload's
        raise
    except OSError as error:
        if error.errno is None:  # some library's own, with its own words
            raise
        raise cannot_write(target, error, kind) from error
    except Exception as error:  # safetensors', which need not be installed
        number = re.search(r"os error (\d+)", str(error))
        if type(error).__name__ != "SafetensorError" or number is None:
            raise
        code = int(number[1])
        raise cannot_write(target, OSError(code, os.strerror(code)), kind) from error

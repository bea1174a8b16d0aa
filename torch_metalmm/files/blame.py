"""Errors of other code about a file, as errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def blaming(path: str | os.PathLike[str], step: str) -> Iterator[None]:
    """Whatever other code raises on strange contents becomes ValueError: path, step, its message.

    ImportError, MemoryError and OSError pass, and so does an error that names the path already.
    """
    try:
        yield
    except (ImportError, MemoryError, OSError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if isinstance(error, ValueError) and said.startswith((str(path), f"cannot read {path}")):
            raise
        if isinstance(error, (LookupError, AssertionError, RecursionError)) or not said:
            said = f"{type(error).__name__}: {said}"  # which say little of themselves
        raise ValueError(f"{path}: {step}: {said}") from error

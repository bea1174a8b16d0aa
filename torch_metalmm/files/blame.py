"""Errors of other code about a file, as errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# RuntimeErrors of torch: memory of MPS is full, a device has no such op. The CPU's allocator says
# other words, and is not among them: it fails where contents name a huge size.
_WORDS = ("out of memory", "Could not run '")


def of_machine(error: Exception) -> bool:
    """Whether contents are not to blame: a package, a file, memory or a device is missing."""
    import torch  # here: commands that only print import none

    of_torch = (torch.OutOfMemoryError, torch.AcceleratorError)
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
    return said or isinstance(error, (ImportError, MemoryError, OSError, *of_torch))


@contextmanager
def blaming(path: str | os.PathLike[str], step: str) -> Iterator[None]:
    """Errors of other code on strange contents become ValueError: path, step, the error's message.

    An error of_machine passes, and so does one that names the path already.
    """
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        names_it = said.startswith((str(path), f"cannot read {path}"))
        if of_machine(error) or (isinstance(error, ValueError) and names_it):
            raise
        if isinstance(error, (LookupError, AssertionError, RecursionError)) or not said:
            said = f"{type(error).__name__}: {said}"  # which say little of themselves
        raise ValueError(f"{path}: {step}: {said}") from error

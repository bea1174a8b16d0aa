"""Pages of a mapped file that may not be touched: what does kills the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

PAGE = mmap.PAGESIZE

Spans = list[tuple[int, int]]  # bytes of a file, ends excluded


def pages(spans: Iterable[tuple[int, int]]) -> set[int]:
    """The pages that have any of the bytes."""
    return {page for a, b in spans for page in range(a // PAGE, -(-b // PAGE))}


def forbid(path: Path, allowed: set[int]) -> int:
    """Let only the pages `allowed` of the file be touched where it is mapped now; how many maps."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[5] != str(path.resolve()):
            continue
        first, last = (int(part, 16) for part in fields[0].split("-"))
        begin = int(fields[2], 16) // PAGE
        found += 1
        for page in range((last - first) // PAGE):
            if page + begin not in allowed and libc.mprotect(first + page * PAGE, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
    return found

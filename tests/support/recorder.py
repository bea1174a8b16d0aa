"""What the Metal engine encodes, recorded on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_metalmm import _C


@contextmanager
def recorded(chip: str = "m1", cores: int = 0) -> Iterator[list[Any]]:
    """The list has, at the end, the encoder calls of the ops that ran inside."""
    calls: list[Any] = []
    _C.install_recorder(chip, cores)
    try:
        yield calls
    finally:
        calls += _C.remove_recorder()


def passes_of(calls: list[Any]) -> list[list[Any]]:
    """Encoder calls, cut after each dispatch; without commits."""
    out: list[list[Any]] = [[]]
    for call in calls:
        if call[0] != "commit":
            out[-1].append(call)
        if call[0] == "dispatch":
            out.append([])
    assert not out.pop(), "calls after the last dispatch"
    return out


def buffers_of(calls: list[Any]) -> dict[str, list[int]]:
    """{slot: [base, offset, bytes]} of the encoder calls of a pass."""
    return {_C.SLOTS[slot]: rest for name, slot, *rest in calls if name == "set_buffer"}

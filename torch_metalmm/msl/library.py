"""Compiled shader libraries: their kernels, launches on CPU memory, the emulator's reports."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .lines import line_of

_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
Size = int | Sequence[int]

_C.set_line_of(line_of)


@dataclass(eq=False)
class EmulatorFault(RuntimeError):
    """The fault that the emulator found, and its place; `other` is the second place of a race."""

    kind: str
    kernel: str
    text: str
    threadgroup: tuple[int, int, int] = (0, 0, 0)
    simdgroup: int = 0
    lane: int = 0
    file: str = ""
    line: int = 0
    other: tuple[str, int] | None = None

    def __str__(self) -> str:
        return str(_C.fault_message(**asdict(self)))


class Library:
    """A compiled shader file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._native = _C.ShaderLibrary(str(path))
        self.kernels: dict[str, list[tuple[str, int]]] = self._native.kernels()
        self.constants: dict[str, tuple[int, str, int, int]] = self._native.constants()

    def function(self, name: str, constants: Mapping[int | str, Any] | None = None) -> Function:
        """The kernel `name` with function constants {index or name: value}; else KeyError."""
        if name not in self.kernels:
            raise KeyError(f"no kernel {name!r}; there are: {', '.join(sorted(self.kernels))}")
        return Function(self, name, self._encode(constants or {}))

    def _encode(self, constants: Mapping[int | str, Any]) -> list[tuple[int, bytes]]:
        by_index = {constant[0]: constant[1:] for constant in self.constants.values()}
        encoded = []
        for key, value in constants.items():
            if isinstance(key, str) and key not in self.constants:
                raise KeyError(f"no function constant {key!r}; there are: {list(self.constants)}")
            index = self.constants[key][0] if isinstance(key, str) else key
            kind, size, count = by_index.get(index, ("integer", 4, 1))
            values = list(value) if isinstance(value, Sequence) else [value]
            if len(values) != count:
                raise ValueError(f"function constant {key!r}: {value!r}; it has {count} values")
            element = size // (4 if count == 3 else count)
            encoded.append((index, b"".join(_bytes_of(kind, element, v) for v in values)))
        return encoded

    def launch(self, kernel: str, **launch: Any) -> None:
        """Runs a kernel: the arguments are those of _C.ShaderLibrary.launch. EmulatorFault."""
        if fault := self._native.launch(kernel, **launch):
            raise EmulatorFault(**fault)


def _bytes_of(kind: str, size: int, value: Any) -> bytes:
    if kind == "integer":
        return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(torch.tensor([value], dtype=_DTYPES[kind]).view(torch.uint8).tolist())


def _size(size: Size) -> tuple[int, int, int]:
    s = (size,) if isinstance(size, int) else tuple(size)
    return (*s, 1, 1, 1)[:3]  # type: ignore[return-value]


def _memory(value: Any) -> Tensor:
    """The bytes of an argument: a tensor's own, or a scalar's (int as uint32, float as f32)."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise ValueError("a buffer must be a contiguous tensor on the CPU")
        return value
    if isinstance(value, bool):
        value = bytes([value])
    elif isinstance(value, int):
        value = (value & 0xFFFFFFFF).to_bytes(4, "little")
    elif isinstance(value, float):
        value = struct.pack("<f", value)
    return torch.frombuffer(bytearray(bytes(value)), dtype=torch.uint8)


def _numbered(items: Sequence[Any] | Mapping[int, Any]) -> Iterable[tuple[int, Any]]:
    return items.items() if isinstance(items, Mapping) else enumerate(items)


@dataclass
class Function:
    """A kernel with its function constants."""

    library: Library
    name: str
    constants: list[tuple[int, bytes]]

    def __call__(
        self,
        grid: Size,
        group: Size,
        buffers: Sequence[Any] | Mapping[int, Any],
        threadgroup_bytes: Sequence[int] | Mapping[int, int] = (),
        *,
        threads: Size | None = None,
        schedule: str = "both",
        allow_inactive: bool = False,
        allow_uninitialized: bool = False,
        flush_subnormals: bool = False,
        workers: int | None = None,
        timeout: int = _C.EMULATOR_SECONDS,
    ) -> None:
        """Runs `grid` threadgroups of `group` threads; buffers[i] is [[buffer(i)]], in place.

        Buffers and threadgroup memory that no lane touches may be left out, as on a GPU.
        schedule: "ascending", "descending" simdgroups and lanes, or "both" on equal inputs, whose
        results must agree bit for bit. threads: those of the grid, fewer than grid * group.
        allow_inactive: collectives and barriers may run without threads that have returned or wait
        elsewhere, as on a GPU, where the value of such a thread is undefined: not by default.
        allow_uninitialized: threadgroup memory that nobody wrote may be read. flush_subnormals:
        operands and results of f32 and bf16 arithmetic below 2^-126 are zeros of their sign, as on
        Apple's GPUs; f16 keeps them. timeout: seconds after which a run is an endless loop; 0:
        never. Raises EmulatorFault, and ValueError for a slot that there is not.
        """
        memory = {i: _memory(b) for i, b in _numbered(buffers) if b is not None}
        if schedule not in ("both", "ascending", "descending"):
            raise ValueError(f"schedule: {schedule!r}; allowed: both, ascending, descending")
        launch = {
            "grid": _size(grid),
            "group": _size(group),
            "threads": None if threads is None else _size(threads),
            "threadgroup_bytes": dict(_numbered(threadgroup_bytes)),
            "allow_inactive": allow_inactive,
            "allow_uninitialized": allow_uninitialized,
            "flush_subnormals": flush_subnormals,
            "workers": workers or len(os.sched_getaffinity(0)),
            "seconds": timeout,
        }
        if schedule == "both":
            first = {i: b.clone() for i, b in memory.items()}
            self._run(first, launch)
        self._run(memory, launch | {"descending": schedule != "ascending"})
        if schedule == "both":
            self._compare(first, memory)

    def _run(self, memory: Mapping[int, Tensor], launch: dict[str, Any]) -> None:
        buffers = {i: (t.data_ptr(), t.numel() * t.element_size()) for i, t in memory.items()}
        self.library.launch(self.name, buffers=buffers, constants=self.constants, **launch)

    def _compare(self, first: Mapping[int, Tensor], second: Mapping[int, Tensor]) -> None:
        for i, a in first.items():
            a8, b8 = a.flatten().view(torch.uint8), second[i].flatten().view(torch.uint8)
            if not torch.equal(a8, b8):
                at = int((a8 != b8).nonzero()[0]) // a.element_size()
                text = (
                    "missing barrier: ascending and descending schedules differ, first in element "
                    f"{at} of [[buffer({i})]]: {a.flatten()[at]} and {second[i].flatten()[at]}"
                )
                raise EmulatorFault("race", self.name, text)

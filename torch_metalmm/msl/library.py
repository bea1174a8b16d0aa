"""Compiled shader libraries: their kernels, launches on CPU memory, the emulator's reports."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .source import ROLES

_MAX_SLOTS = 32
_FAULTS: tuple[str, ...] = (
    "none",
    "usage",
    "divergent",
    "deadlock",
    "out_of_bounds",
    "misaligned",
    "race",
)
_FAULTS += ("uninitialized", "undefined", "timeout", "read_only")
_DESCENDING, _ALLOW_INACTIVE, _ALLOW_UNINITIALIZED, _FLUSH_SUBNORMALS = 1, 2, 4, 8
_SECONDS = 300
Size = int | Sequence[int]


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Constant(ctypes.Structure):
    _fields_ = [
        ("index", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("value", ctypes.c_uint8 * 32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("workers", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("seconds", ctypes.c_uint32),
        ("n_constants", ctypes.c_uint32),
        ("constants", ctypes.POINTER(_Constant)),
        ("buffers", _Buffer * _MAX_SLOTS),
        ("threadgroup_bytes", ctypes.c_uint32 * _MAX_SLOTS),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("fault", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("simdgroup", ctypes.c_uint32),
        ("lane", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("file", ctypes.c_char_p),
        ("other_file", ctypes.c_char_p),
        ("line", ctypes.c_uint32),
        ("other_line", ctypes.c_uint32),
        ("text", ctypes.c_char * 512),
    ]


class _ArgumentEntry(ctypes.Structure):
    _fields_ = [
        ("role", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("is_read_only", ctypes.c_bool),
    ]


class _KernelEntry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("n_arguments", ctypes.c_uint32),
        ("arguments", ctypes.POINTER(_ArgumentEntry)),
    ]


class _ConstantEntry(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("index", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("storage", ctypes.c_void_p),
    ]


@dataclass(eq=False)
class EmulatorFault(RuntimeError):
    """What the emulator found wrong, and where; `other` is the second place of a race."""

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
        if self.kind == "usage":
            return self.text
        place = f"{self.file}:{self.line}: " if self.file else ""
        who = f"{self.kernel}, threadgroup {self.threadgroup}"
        if self.file:
            who += f", simdgroup {self.simdgroup}, lane {self.lane}"
        other = f" (the other at {self.other[0]}:{self.other[1]})" if self.other else ""
        return f"{place}{self.text}{other} [{who}]"


class Library:
    """A compiled shader file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._dll.mm_launch.argtypes = [ctypes.POINTER(_Launch), ctypes.POINTER(_Report)]
        self.kernels: dict[str, list[tuple[str, int]]] = {}
        for kernel in self._table(_KernelEntry, "mm_kernels"):
            arguments = [kernel.arguments[i] for i in range(kernel.n_arguments)]
            self.kernels[kernel.name.decode()] = [(ROLES[a.role], a.index) for a in arguments]
        self.constants = {
            c.name.decode(): (c.index, c.kind, c.bytes, c.count)
            for c in self._table(_ConstantEntry, "mm_constants")
        }

    def _table(self, entry: Any, name: str) -> Any:
        n = ctypes.c_uint32.in_dll(self._dll, name.replace("mm_", "mm_n_")).value
        return (entry * n).in_dll(self._dll, name)

    def function(self, name: str, constants: Mapping[int | str, Any] | None = None) -> Function:
        """The kernel `name` with function constants {index or name: value}; else KeyError."""
        if name not in self.kernels:
            raise KeyError(f"no kernel {name!r}; there are: {', '.join(sorted(self.kernels))}")
        return Function(self, name, self._encode(constants or {}))

    def _encode(self, constants: Mapping[int | str, Any]) -> list[tuple[int, bytes]]:
        by_index = {index: rest for index, *rest in self.constants.values()}
        encoded = []
        for key, value in constants.items():
            if isinstance(key, str) and key not in self.constants:
                raise KeyError(f"no function constant {key!r}; there are: {list(self.constants)}")
            index = self.constants[key][0] if isinstance(key, str) else key
            kind, size, count = by_index.get(index, (0, 4, 1))
            values = list(value) if isinstance(value, Sequence) else [value]
            if len(values) != count:
                raise ValueError(f"function constant {key!r}: {value!r}; it has {count} values")
            element = size // (4 if count == 3 else count)
            encoded.append((index, b"".join(_bytes_of(kind, element, v) for v in values)))
        return encoded

    def launch(self, launch: _Launch) -> None:
        """Runs `launch`; raises EmulatorFault."""
        report = _Report()
        if self._dll.mm_launch(ctypes.byref(launch), ctypes.byref(report)):
            raise self._fault(launch, report)

    def _place(self, file: bytes | None, line: int, pc: int) -> tuple[str, int] | None:
        if file:
            return file.decode(), line
        if not pc:
            return None
        from .lines import line_of

        return line_of(self.path, pc)

    def _fault(self, launch: _Launch, r: _Report) -> EmulatorFault:
        file, line = self._place(r.file, r.line, r.pc) or ("", 0)
        return EmulatorFault(
            _FAULTS[r.fault],
            launch.kernel.decode(),
            r.text.decode(errors="replace"),
            tuple(r.threadgroup),
            r.simdgroup,
            r.lane,
            file,
            line,
            self._place(r.other_file, r.other_line, r.other_pc),
        )


def _bytes_of(kind: int, size: int, value: Any) -> bytes:
    if kind == 0:
        return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
    dtype = (torch.float32, torch.float16, torch.bfloat16)[kind - 1]
    return bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist())


def _size(size: Size) -> tuple[int, int, int]:
    s = (size,) if isinstance(size, int) else tuple(size)
    return (*s, 1, 1, 1)[:3]  # type: ignore[return-value]


def _slot(kind: str, index: int) -> int:
    if not 0 <= index < _MAX_SLOTS:
        raise ValueError(f"[[{kind}({index})]]: indices from 0 to {_MAX_SLOTS - 1} are allowed")
    return index


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
        timeout: int = _SECONDS,
    ) -> None:
        """Runs `grid` threadgroups of `group` threads; buffers[i] is [[buffer(i)]], in place.

        Buffers and threadgroup memory that no lane touches may be left out, as on a GPU.
        schedule: "ascending", "descending" simdgroups and lanes, or "both" on equal inputs, whose
        results must agree bit for bit. threads: those of the grid, fewer than grid * group.
        allow_inactive: collectives and barriers may run without threads that have returned or wait
        elsewhere, as on a GPU, where what such a thread would give is undefined: not by default.
        allow_uninitialized: threadgroup memory that nobody wrote may be read. flush_subnormals:
        operands and results of f32 and bf16 arithmetic below 2^-126 are zeros of their sign, as on
        Apple's GPUs; f16 keeps them. timeout: seconds after which a run is an endless loop; 0:
        never. Raises EmulatorFault, and ValueError for a slot that there is not.
        """
        items = buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers)
        memory = {i: _memory(b) for i, b in items if b is not None}
        sizes = (
            threadgroup_bytes
            if isinstance(threadgroup_bytes, Mapping)
            else dict(enumerate(threadgroup_bytes))
        )
        flags = allow_inactive * _ALLOW_INACTIVE | allow_uninitialized * _ALLOW_UNINITIALIZED
        flags |= flush_subnormals * _FLUSH_SUBNORMALS
        launch = self._launch(_size(grid), _size(group), sizes, flags, workers)
        launch.seconds = timeout
        if threads is not None:
            launch.threads[:] = _size(threads)
        if schedule not in ("both", "ascending", "descending"):
            raise ValueError(f"schedule: {schedule!r}; allowed: both, ascending, descending")
        if schedule == "both":
            first = {i: b.clone() for i, b in memory.items()}
            self._run(launch, first)
        launch.flags |= _DESCENDING if schedule != "ascending" else 0
        self._run(launch, memory)
        if schedule == "both":
            self._compare(first, memory)

    def _launch(
        self,
        grid: tuple[int, int, int],
        group: tuple[int, int, int],
        sizes: Mapping[int, int],
        flags: int,
        workers: int | None,
    ) -> _Launch:
        launch = _Launch(kernel=self.name.encode(), flags=flags)
        launch.grid[:], launch.group[:] = grid, group
        launch.threads[:] = [a * b for a, b in zip(grid, group, strict=True)]
        launch.workers = workers or len(os.sched_getaffinity(0))
        array = (_Constant * len(self.constants))()
        for slot, (index, raw) in zip(array, self.constants, strict=True):
            slot.index, slot.bytes = index, len(raw)
            slot.value[: len(raw)] = raw
        launch.constants, launch.n_constants = array, len(array)
        for i, n in sizes.items():
            launch.threadgroup_bytes[_slot("threadgroup", i)] = n
        return launch

    def _run(self, launch: _Launch, memory: Mapping[int, Tensor]) -> None:
        for i, t in memory.items():
            launch.buffers[_slot("buffer", i)] = _Buffer(t.data_ptr(), t.numel() * t.element_size())
        self.library.launch(launch)

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

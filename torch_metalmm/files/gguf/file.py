"""Reading a GGUF file: header checks, metadata, and tensors as views of a memory map."""

from __future__ import annotations

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import formats
from ...models.ggml import type_names

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # dimensions of a ggml tensor
_U32_VALUE, _STRING, _ARRAY = 4, 8, 9
# struct codes of the fixed-size value types, by their id in the file
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# Limits that no model comes near, and up to which this reader and transformers take seconds: files
# of 2026 have up to 100 values, 2,000 tensors, and chat templates of 60 KB.
_MAX_VALUES, _MAX_TENSORS, _MAX_TEXT = 1 << 12, 1 << 16, 1 << 20
_MIN_ALIGNMENT = 8  # the specification's default; with it every tensor may be viewed as f32

# The type alone stands for ggml's tensors, which have more bytes: groups of 64.
_OTHER_Q2_0 = "; a file of q2_0 in groups of 128, as forks wrote before ggml had it, is not read"

# A private writable map is charged against memory in full, although nothing here writes to it, and
# a file beyond memory would not open. Python names the flag from 3.13 on; macOS charges no map.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file: shape in torch order, the last dimension contiguous."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int  # from the start of the file
    nbytes: int


@dataclass(frozen=True)
class ArrayEntry:
    """An array of the metadata: its length, and the bytes of its longest element."""

    count: int
    longest: int


class GgufFile:
    """A checked GGUF header and a private memory map of the file.

    metadata: scalars and strings by key. arrays: ArrayEntry by key. tensors: TensorEntry by name;
    they are aligned and disjoint. Reading a page of the map costs memory only while it is in use.
    Writing to a tensor copies its page and never reaches the file. The file must not be truncated
    while tensors of it are alive: reading them beyond its end kills the process (SIGBUS).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Parse and check the header; read no tensor data.

        FileNotFoundError, IsADirectoryError, OSError (it cannot be read or mapped), or ValueError
        that says what is wrong: not a GGUF file, big-endian, unknown version, truncated, a count or
        extent beyond the file or beyond any model's, a tensor that overlaps another, is not
        aligned, or has a type without a format here.
        """
        self.path = os.fspath(path)
        if os.path.isdir(self.path):
            raise IsADirectoryError(f"{self.path} is a folder, not a GGUF file")
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"no such GGUF file: {self.path}")
        if os.path.getsize(self.path) < 24:
            raise self.error("it is shorter than a GGUF header")
        self._map = self._map_privately()
        self._array = np.frombuffer(self._map, np.uint8)
        self._bytes = self._array.data
        self.metadata: dict[str, Any] = {}
        self.arrays: dict[str, ArrayEntry] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            self._parse()
        except (struct.error, OverflowError):
            raise self.error("it is truncated: its header runs past the end of the file") from None
        except UnicodeDecodeError:
            raise self.error("a key or name in its header is not UTF-8 text") from None

    @property
    def architecture(self) -> str:
        """general.architecture. ValueError if the file does not state it."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise self.error("its metadata has no general.architecture")
        return name

    def packed(self, name: str) -> Tensor:
        """The tensor's bytes, uint8 [*shape[:-1], row_bytes], as a view of the map.

        ValueError: the file has been truncated since it was opened.
        """
        entry = self.tensors[name]
        if self._map.size() < entry.offset + entry.nbytes:
            raise self.error(
                f"it was truncated to {self._map.size()} bytes while open; tensor {name!r} ends at "
                f"byte {entry.offset + entry.nbytes}"
            )
        data = self._array[entry.offset : entry.offset + entry.nbytes]
        return torch.from_numpy(data).view(*entry.shape[:-1], -1)

    def dense(self, name: str) -> Tensor:
        """The tensor decoded to a new float32 tensor of its shape."""
        entry = self.tensors[name]
        k = entry.shape[-1]
        rows = self.packed(name).reshape(-1, formats.get(entry.format).row_bytes(k))
        out: Tensor = torch.ops.metalmm.dequantize(rows, entry.format, k)
        return out.view(entry.shape)

    def stated(self, key: str, default: Any = None) -> Any:
        """The value of a key without the architecture's prefix; an array as a list."""
        return self.value(f"{self.architecture}.{key}", default)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a whole key; an array as a list."""
        return self.array(key) if key in self.arrays else self.metadata.get(key, default)

    def integer(self, key: str, value: Any, low: int, high: int | None = None) -> int:
        """The value, which the key has. ValueError: it is no integer from low to high."""
        if type(value) is not int or value < low or (high is not None and value > high):
            limit = "on" if high is None else f"to {high}"
            raise ValueError(
                f"{self.path}: {key} = {value!r}; allowed: integers from {low} {limit}"
            )
        return value

    def array(self, key: str) -> list[Any]:
        """The elements of an array of the metadata. ValueError: a text of it is not UTF-8."""
        start, end = self._spans[key]
        (length,) = _U64.unpack_from(self._bytes, start)
        pos = start + 8 + length + 4
        kind, count = struct.unpack_from("<IQ", self._bytes, pos)
        data = bytes(self._bytes[pos + 12 : end])
        if kind != _STRING:
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", data))
        texts, pos = [], 0
        try:
            for _ in range(count):
                after = pos + 8
                pos = after + int.from_bytes(data[pos:after], "little")
                texts.append(data[after:pos].decode())
        except UnicodeDecodeError:
            raise self.error(f"{key} has a text that is not UTF-8") from None
        return texts

    def _map_privately(self) -> mmap.mmap:
        """The file in memory, copy-on-write: torch wants writable memory."""
        flags, access = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        with open(self.path, "rb") as file:
            try:
                return mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
            except OSError as error:
                raise OSError(error.errno, f"cannot map it: {error.strerror}", self.path) from None

    def error(self, what: str) -> ValueError:
        """The error to raise where the file is not as it must be."""
        return ValueError(f"cannot read {self.path}: {what}")

    def _parse(self) -> None:
        size = len(self._bytes)
        if bytes(self._bytes[:4]) != _MAGIC:
            raise self.error("it does not start with the GGUF magic, so it is not a GGUF file")
        version, n_tensors, n_values = struct.unpack_from("<IQQ", self._bytes, 4)
        if version & 0xFFFF == 0:
            raise self.error("it is big-endian; only little-endian files are supported")
        if version not in _VERSIONS:
            raise self.error(f"it is GGUF version {version}; versions 2 and 3 are supported")
        # The smallest entries: an empty key with a 1-byte value, an empty name with one dimension.
        if n_values > size // 13 or n_tensors > size // 32:
            raise self.error(
                f"it claims {n_values} metadata values and {n_tensors} tensors in {size} bytes"
            )
        if n_values > _MAX_VALUES or n_tensors > _MAX_TENSORS:
            raise self.error(
                f"it has {n_values} metadata values and {n_tensors} tensors; "
                f"at most {_MAX_VALUES} and {_MAX_TENSORS} are read"
            )
        pos = 24
        for _ in range(n_values):
            pos = self._read_value(pos)
        raw = []
        for _ in range(n_tensors):
            entry, pos = self._read_tensor_info(pos)
            raw.append(entry)
        alignment = self._alignment()
        start = -(-pos // alignment) * alignment
        types = type_names()
        for name, shape, type_id, offset in raw:
            if offset % alignment:
                raise self.error(
                    f"tensor {name!r} has the offset {offset}, no multiple of the alignment "
                    f"{alignment}"
                )
            self._add_tensor(name, shape, types.get(type_id, f"#{type_id}"), start + offset)
        self._check_disjoint()

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if value < _MIN_ALIGNMENT or value & (value - 1):
            raise self.error(
                f"general.alignment = {value} is not a power of two of at least {_MIN_ALIGNMENT}"
            )
        return int(value)

    def _check_disjoint(self) -> None:
        for one, other in pairwise(sorted(self.tensors.values(), key=lambda t: t.offset)):
            if one.offset + one.nbytes > other.offset:
                raise self.error(
                    f"the tensors {one.name!r} and {other.name!r} overlap"
                    f"{_OTHER_Q2_0 if one.format == 'q2_0' else ''}"
                )

    def _string(self, pos: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._bytes, pos)
        end = pos + 8 + length
        if end > len(self._bytes):
            raise struct.error
        if length > _MAX_TEXT:
            raise self.error(
                f"the text at byte {pos + 8} has {length} bytes; at most {_MAX_TEXT} are read"
            )
        return str(self._bytes[pos + 8 : end], "utf-8"), end

    def _read_value(self, start: int) -> int:
        """One key and value; returns the position behind it."""
        key, pos = self._string(start)
        (kind,) = _U32.unpack_from(self._bytes, pos)
        pos += 4
        if key in self._spans:
            raise self.error(f"the metadata key {key!r} appears twice")
        if key == "general.alignment" and kind != _U32_VALUE:
            raise self.error(f"{key} has the type {kind}; it must be a 32-bit unsigned integer")
        if kind == _STRING:
            self.metadata[key], pos = self._string(pos)
        elif kind == _ARRAY:
            self.arrays[key], pos = self._skip_array(key, pos)
        elif kind in _SCALARS:
            (self.metadata[key],) = struct.unpack_from("<" + _SCALARS[kind], self._bytes, pos)
            pos += struct.calcsize("<" + _SCALARS[kind])
        else:
            raise self.error(f"the metadata value {key!r} has the unknown type {kind}")
        self._spans[key] = (start, pos)
        return pos

    def _skip_array(self, key: str, pos: int) -> tuple[ArrayEntry, int]:
        kind, count = struct.unpack_from("<IQ", self._bytes, pos)
        pos += 12
        if kind not in _SCALARS and kind != _STRING:
            raise self.error(f"the array {key!r} has elements of the unsupported type {kind}")
        width = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
        left = len(self._bytes) - pos
        if count * width > left:
            raise self.error(f"it is truncated: {key!r} has {count} elements, {left} bytes follow")
        if kind != _STRING:
            return ArrayEntry(count, width), pos + count * width
        unpack, data, longest = _U64.unpack_from, self._bytes, 0
        for _ in range(count):
            (length,) = unpack(data, pos)
            longest = max(longest, length)
            pos += 8 + length
        return ArrayEntry(count, longest), pos

    def _read_tensor_info(self, pos: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, pos = self._string(pos)
        (n_dims,) = _U32.unpack_from(self._bytes, pos)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self.error(f"tensor {name!r} has {n_dims} dimensions")
        dims = struct.unpack_from(f"<{n_dims}Q", self._bytes, pos + 4)
        pos += 4 + 8 * n_dims
        type_id, offset = struct.unpack_from("<IQ", self._bytes, pos)
        return (name, dims[::-1], type_id, offset), pos + 12

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: str, offset: int) -> None:
        if name in self.tensors:
            raise self.error(f"the tensor {name!r} appears twice")
        if kind not in _formats_in_files():
            raise self.error(
                f"tensor {name!r} has the type {kind.upper()}, which has no format here; "
                f"supported: {', '.join(f.upper() for f in _formats_in_files())}"
            )
        spec = formats.get(kind)
        if 0 in shape or shape[-1] % spec.block_values:
            raise self.error(f"tensor {name!r} has the shape {list(shape)}, impossible for {kind}")
        nbytes = prod(shape[:-1]) * spec.row_bytes(shape[-1])
        if offset + nbytes > len(self._bytes):
            raise self.error(
                f"it is truncated: tensor {name!r} ends at byte {offset + nbytes} of "
                f"{len(self._bytes)}{_OTHER_Q2_0 if kind == 'q2_0' else ''}"
            )
        self.tensors[name] = TensorEntry(name, shape, kind, offset, nbytes)


def _formats_in_files() -> list[str]:
    """The formats that a GGUF tensor can have."""
    known = set(type_names().values())
    return [name for name in formats.names() if name in known]


def write_out(writer: Any) -> None:
    """Write what a GGUFWriter of one file was given, and close it.

    Not write_tensors_to_file(): numpy's tofile() loses the system's number of an error.
    """
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (out,), (tensors,) = writer.fout, writer.tensors
        writer.write_padding(out, out.tell())
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor.tensor).data)
            writer.write_padding(out, tensor.nbytes)
    finally:
        writer.close()

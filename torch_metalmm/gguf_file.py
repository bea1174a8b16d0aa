"""Reading a GGUF file: header checks, metadata, and tensors as views of a memory map."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from . import formats

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # of a ggml tensor
_STRING, _ARRAY = 8, 9
# struct codes of the fixed-size value types, by their id in the file
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file: shape in torch order, the last dimension contiguous."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int  # from the start of the file
    nbytes: int


class GgufFile:
    """A checked GGUF header and a private memory map of the file.

    metadata: scalars and strings by key. array_lengths: the lengths of the metadata's arrays.
    tensors: TensorEntry by name. Reading a page of the map costs memory only while it is in use;
    the file must not be changed or truncated while tensors of it are alive.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Parse and check the header; read no tensor data.

        FileNotFoundError, IsADirectoryError, or ValueError that says what is wrong: not a GGUF
        file, big-endian, unknown version, truncated, a count or extent beyond the file, a tensor
        type that has no format here.
        """
        self.path = os.fspath(path)
        if os.path.isdir(self.path):
            raise IsADirectoryError(f"{self.path} is a folder, not a GGUF file")
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"no such GGUF file: {self.path}")
        if os.path.getsize(self.path) < 24:
            raise self._error("it is shorter than a GGUF header")
        # Copy-on-write: torch wants writable memory, and nothing ever reaches the file.
        self._map = np.memmap(self.path, dtype=np.uint8, mode="c")
        self._bytes = self._map.data
        self.metadata: dict[str, Any] = {}
        self.array_lengths: dict[str, int] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        try:
            self._parse()
        except (struct.error, OverflowError):
            raise self._error("it is truncated: its header runs past the end of the file") from None
        except UnicodeDecodeError:
            raise self._error("a key or name in its header is not UTF-8 text") from None

    @property
    def architecture(self) -> str:
        """general.architecture. ValueError if the file does not state it."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise self._error("its metadata has no general.architecture")
        return name

    def packed(self, name: str) -> Tensor:
        """The tensor's bytes, uint8 [*shape[:-1], row_bytes], as a view of the map."""
        entry = self.tensors[name]
        data = self._map[entry.offset : entry.offset + entry.nbytes]
        return torch.from_numpy(data).view(*entry.shape[:-1], -1)

    def dense(self, name: str) -> Tensor:
        """The tensor decoded to a new float32 tensor of its shape."""
        entry = self.tensors[name]
        k = entry.shape[-1]
        rows = self.packed(name).reshape(-1, formats.get(entry.format).row_bytes(k))
        out: Tensor = torch.ops.metalmm.dequantize(rows, entry.format, k)
        return out.view(entry.shape)

    def write_header_without_vocabulary(self, out: IO[bytes]) -> None:
        """A GGUF file with this metadata, the tokenizer's arrays and all tensors being empty.

        For readers that need the metadata and the tensor names and are slow on long arrays.
        """
        out.write(_MAGIC + struct.pack("<IQQ", 3, len(self.tensors), len(self._spans)))
        for key, (start, end) in self._spans.items():
            if key.startswith("tokenizer.") and key in self.array_lengths:
                name = key.encode()
                out.write(_U64.pack(len(name)) + name + struct.pack("<IIQ", _ARRAY, _STRING, 0))
            else:
                out.write(self._bytes[start:end])
        for tensor in self.tensors:
            name = tensor.encode()
            out.write(_U64.pack(len(name)) + name + struct.pack("<IQIQ", 1, 0, 0, 0))

    def _error(self, what: str) -> ValueError:
        return ValueError(f"cannot read {self.path}: {what}")

    def _parse(self) -> None:
        size = len(self._bytes)
        if bytes(self._bytes[:4]) != _MAGIC:
            raise self._error("it does not start with the GGUF magic, so it is not a GGUF file")
        version, n_tensors, n_values = struct.unpack_from("<IQQ", self._bytes, 4)
        if version & 0xFFFF == 0:
            raise self._error("it is big-endian; only little-endian files are supported")
        if version not in _VERSIONS:
            raise self._error(f"it is GGUF version {version}; versions 2 and 3 are supported")
        # The smallest entries: an empty key with a 1-byte value, an empty name with one dimension.
        if n_values > size // 13 or n_tensors > size // 32:
            raise self._error(
                f"it claims {n_values} metadata values and {n_tensors} tensors in {size} bytes"
            )
        pos = 24
        for _ in range(n_values):
            pos = self._read_value(pos)
        raw = []
        for _ in range(n_tensors):
            entry, pos = self._read_tensor_info(pos)
            raw.append(entry)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment = {alignment} is not a power of two")
        start = -(-pos // alignment) * alignment
        types = type_names()
        for name, shape, type_id, offset in raw:
            self._add_tensor(name, shape, types.get(type_id, f"#{type_id}"), start + offset)

    def _string(self, pos: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._bytes, pos)
        end = pos + 8 + length
        if end > len(self._bytes):
            raise struct.error
        return str(self._bytes[pos + 8 : end], "utf-8"), end

    def _read_value(self, start: int) -> int:
        """One key and value; returns the position behind it."""
        key, pos = self._string(start)
        (kind,) = _U32.unpack_from(self._bytes, pos)
        pos += 4
        if key in self._spans:
            raise self._error(f"the metadata key {key!r} appears twice")
        if kind == _STRING:
            self.metadata[key], pos = self._string(pos)
        elif kind == _ARRAY:
            self.array_lengths[key], pos = self._skip_array(key, pos)
        elif kind in _SCALARS:
            (self.metadata[key],) = struct.unpack_from("<" + _SCALARS[kind], self._bytes, pos)
            pos += struct.calcsize("<" + _SCALARS[kind])
        else:
            raise self._error(f"the metadata value {key!r} has the unknown type {kind}")
        self._spans[key] = (start, pos)
        return pos

    def _skip_array(self, key: str, pos: int) -> tuple[int, int]:
        kind, count = struct.unpack_from("<IQ", self._bytes, pos)
        pos += 12
        if kind not in _SCALARS and kind != _STRING:
            raise self._error(f"the array {key!r} has elements of the unsupported type {kind}")
        width = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
        left = len(self._bytes) - pos
        if count * width > left:
            raise self._error(f"it is truncated: {key!r} has {count} elements, {left} bytes follow")
        if kind != _STRING:
            return count, pos + count * width
        unpack, data = _U64.unpack_from, self._bytes
        for _ in range(count):
            pos += 8 + unpack(data, pos)[0]
        return count, pos

    def _read_tensor_info(self, pos: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, pos = self._string(pos)
        (n_dims,) = _U32.unpack_from(self._bytes, pos)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name!r} has {n_dims} dimensions")
        dims = struct.unpack_from(f"<{n_dims}Q", self._bytes, pos + 4)
        pos += 4 + 8 * n_dims
        type_id, offset = struct.unpack_from("<IQ", self._bytes, pos)
        return (name, dims[::-1], type_id, offset), pos + 12

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: str, offset: int) -> None:
        if name in self.tensors:
            raise self._error(f"the tensor {name!r} appears twice")
        if kind not in _formats_in_files():
            raise self._error(
                f"tensor {name!r} has the type {kind.upper()}, which has no format here; "
                f"supported: {', '.join(f.upper() for f in _formats_in_files())}"
            )
        spec = formats.get(kind)
        if 0 in shape or shape[-1] % spec.block_values:
            raise self._error(f"tensor {name!r} has the shape {list(shape)}, impossible for {kind}")
        nbytes = prod(shape[:-1]) * spec.row_bytes(shape[-1])
        if offset + nbytes > len(self._bytes):
            raise self._error(
                f"it is truncated: tensor {name!r} ends at byte {offset + nbytes} of "
                f"{len(self._bytes)}"
            )
        self.tensors[name] = TensorEntry(name, shape, kind, offset, nbytes)


def type_names() -> dict[int, str]:
    """ggml's type ids and their names, lower case."""
    from gguf import GGMLQuantizationType

    return {int(kind): kind.name.lower() for kind in GGMLQuantizationType}


def _formats_in_files() -> list[str]:
    """The formats that a GGUF tensor can have."""
    known = set(type_names().values())
    return [name for name in formats.names() if name in known]

"""GGUF files byte by byte, also such as no writer makes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

# value types, and how struct packs them
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(key: str, kind: int, what: object) -> bytes:
    """A key and a scalar or a string; what may also be the bytes themselves."""
    if not isinstance(what, bytes):
        what = text(str(what)) if kind == STRING else struct.pack("<" + _CODES[kind], what)
    return text(key) + struct.pack("<I", kind) + what


def array(key: str, kind: int, count: int, elements: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + elements


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """The entry of a tensor; shape in torch's order, kind is ggml's number of the type."""
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def content(
    values: Sequence[bytes], tensors: Sequence[bytes], data: bytes, alignment: int = 32
) -> bytes:
    """A whole file."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    header += b"".join(values) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def write(
    path: Path,
    values: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    alignment: int = 32,
) -> Path:
    path.write_bytes(content(values, tensors, data, alignment))
    return path

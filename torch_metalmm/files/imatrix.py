"""llama.cpp's importance matrices: GGUF files, and the .dat files of before July 2025."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..extras import require
from ..models.replace import packable, weight_shape
from .gguf.file import GgufFile, write_out
from .gguf.map import gguf_names
from .staging import replaced

_SUMS, _COUNTS = ".in_sum2", ".counts"
_I32 = struct.Struct("<i")
_MAX_NAME = 1 << 12


@dataclass(frozen=True)
class Entry:
    """A weight's columns: Σ x² f32 [matrices, K] over counts f32 [matrices] rows of x."""

    sums: np.ndarray
    counts: np.ndarray

    def means(self) -> np.ndarray:
        """The mean of x², f32 [matrices, K]: 1 for a matrix that saw no x, as in llama.cpp."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.sums / np.maximum(counts, 1), 1).astype(np.float32)


@dataclass(frozen=True)
class Imatrix:
    """{name of a weight in GGUF files ("blk.0.attn_q.weight"): Entry}, and where they come from."""

    entries: Mapping[str, Entry]
    datasets: tuple[str, ...] = field(default=())
    chunks: int = 0
    chunk_size: int = 512  # tokens


def read_importance(
    path: str | os.PathLike[str], model: Any, *, as_packed: bool = False
) -> dict[str, Tensor]:
    """{linear layer of a transformers model: f32 [K]}, what quantize_ takes as importance.

    path: an importance matrix as read_imatrix reads it. Its entries have the names of GGUF files,
    or those of the model ("model.layers.0.mlp.up_proj", also with ".weight"); stacked experts and
    weights that the model has not are passed over. as_packed: the columns of a layer with an
    input_order are those of its packed weight, as in a GGUF file that the model came from.
    OSError, ValueError: as read_imatrix, nothing in the file is of the model, or an entry has
    another K than its layer.
    """
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if packable(module) and not isinstance(module, nn.Embedding)
    }
    owners = {name: layer for layer in layers for name in (layer, f"{layer}.weight")}
    with suppress(ValueError):  # gguf has no such architecture
        owners |= gguf_names(model, layers, whole=True)
    found = {}
    for name, entry in read_imatrix(path).entries.items():
        layer = owners.get(name)
        if layer is None or len(entry.sums) != 1:
            continue
        k = weight_shape(layers[layer])[1]
        if entry.sums.shape[1] != k:
            raise ValueError(f"{path}: {name} has {entry.sums.shape[1]} columns, {layer} has {k}")
        columns = torch.from_numpy(entry.means()[0])
        order = getattr(layers[layer], "input_order", None)
        if as_packed and order is not None:
            columns = columns[order.cpu().argsort()]
        found[layer] = columns
    if not found:
        raise ValueError(f"{path} has no entry for a linear layer of the model")
    return found


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """The matrix in a GGUF or .dat file; the bytes say which it is.

    A .dat file has no counts of rows, only of chunks: its sums are means times chunks, and each
    count is the number of chunks, with a chunk_size of 1.
    OSError. ValueError: the file is neither, truncated, or its tensors do not fit each other.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    return _read_gguf(path) if magic == b"GGUF" else _read_dat(Path(path))


def write_imatrix(path: str | os.PathLike[str], matrix: Imatrix) -> None:
    """Write a GGUF file, or a .dat file if the path ends so; llama-quantize reads both.

    A .dat file keeps one dataset, and for each weight the means times the number of chunks.
    ValueError, before the file is made: chunks or chunk_size are no integers of at least 0 and 1.
    """
    for what, value, least in (("chunks", matrix.chunks, 0), ("chunk_size", matrix.chunk_size, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{what} must be an integer of at least {least}, got {value!r}")
    if os.fspath(path).endswith(".dat"):
        with replaced(Path(path)) as new:
            new.write_bytes(_dat(matrix))
        return
    require("write_imatrix", "gguf")
    with replaced(Path(path)) as new:
        _write_gguf(new, matrix)


def _write_gguf(path: Path, matrix: Imatrix) -> None:
    from gguf import GGUFWriter

    class Writer(GGUFWriter):
        def add_architecture(self) -> None:
            """Write nothing: an importance matrix is of no architecture."""

    writer = Writer(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", list(matrix.datasets))
    writer.add_uint32("imatrix.chunk_count", matrix.chunks)
    writer.add_uint32("imatrix.chunk_size", matrix.chunk_size)
    for name, entry in sorted(matrix.entries.items()):
        writer.add_tensor(name + _SUMS, np.ascontiguousarray(entry.sums, np.float32))
        writer.add_tensor(name + _COUNTS, entry.counts.astype(np.float32)[:, None])
    write_out(writer)


def _read_gguf(path: str | os.PathLike[str]) -> Imatrix:
    file = GgufFile(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ValueError(f"{file.path}: general.type must be 'imatrix'")
    entries = {}
    for name in file.tensors:
        if not name.endswith(_SUMS):
            continue
        owner = name.removesuffix(_SUMS)
        counts = file.tensors.get(owner + _COUNTS)
        sums = file.tensors[name]
        kinds = {sums.format, counts.format} if counts is not None else set()
        if counts is None or kinds != {"f32"} or counts.shape != (*sums.shape[:-1], 1):
            raise ValueError(f"{file.path}: {owner} must have in_sum2 and counts, f32, of one size")
        values = file.dense(name).reshape(-1, sums.shape[-1]).numpy()
        entries[owner] = _checked(
            file.path, owner, values, file.dense(counts.name).flatten().numpy()
        )
    numbers = ("imatrix.chunk_count", 0), ("imatrix.chunk_size", 1)
    chunks, size = (file.integer(key, file.metadata.get(key), least) for key, least in numbers)
    return Imatrix(entries, _datasets(file), chunks, size)


def _datasets(file: GgufFile) -> tuple[str, ...]:
    names = file.value("imatrix.datasets", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file.path}: imatrix.datasets must be an array of strings")
    return tuple(names)


def _checked(path: str, name: str, sums: np.ndarray, counts: np.ndarray) -> Entry:
    for what, values in (("in_sum2", sums), ("counts", counts)):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{path}: {what} of {name} must be finite and not negative")
    return Entry(sums, counts)


def _dat(matrix: Imatrix) -> bytes:
    parts = [_I32.pack(len(matrix.entries))]
    for name, entry in sorted(matrix.entries.items()):
        calls = max(1, -(-int(entry.counts.max(initial=0)) // matrix.chunk_size))
        values = (entry.means() * np.float32(calls)).astype("<f4")
        parts += [_I32.pack(len(name.encode())), name.encode()]
        parts += [_I32.pack(calls), _I32.pack(values.size), values.tobytes()]
    dataset = (matrix.datasets[-1] if matrix.datasets else "").encode()
    return b"".join([*parts, _I32.pack(matrix.chunks), _I32.pack(len(dataset)), dataset])


def _read_dat(path: Path) -> Imatrix:
    data, at = path.read_bytes(), 0

    def take(count: int, what: str) -> bytes:
        nonlocal at
        if not 0 <= count <= len(data) - at:
            raise ValueError(
                f"{path} is no importance matrix: {what} runs past the end of the file"
            )
        at += count
        return data[at - count : at]

    def number(what: str) -> int:
        return int(_I32.unpack(take(4, what))[0])

    entries = {}
    for _ in range(number("its number of entries")):
        length = number("the length of a name")
        if not 0 < length <= _MAX_NAME:
            raise ValueError(f"{path} is no importance matrix: a name of {length} bytes")
        name = take(length, "a name").decode(errors="replace")
        calls, count = number(name), number(name)
        if calls < 1 or count < 1:
            raise ValueError(f"{path}: {name} has {count} values of {calls} chunks")
        values = np.frombuffer(take(4 * count, name), "<f4").reshape(1, -1)
        entries[name] = _checked(str(path), name, values, np.array([calls], np.float32))
    if not entries:
        raise ValueError(f"{path} is no importance matrix: it has no entries")
    chunks, dataset = 0, ""
    if at < len(data):  # older files end here
        chunks = number("its number of chunks")
        dataset = take(number("the length of its dataset"), "its dataset").decode(errors="replace")
    return Imatrix(entries, (dataset,) if dataset else (), chunks, 1)

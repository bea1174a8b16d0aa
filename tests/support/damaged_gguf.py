"""GGUF files damaged at random: refused with a reason, or read as the gguf package reads them.

Every file is small, whole except for one to three changes to its header, and known by its number.
What is demanded of it: GgufFile and, for one file in LOAD_EVERY, load_gguf raise ValueError with
the path in it, or accept the file; a file that GgufFile accepts is one that gguf.GGUFReader reads,
with the same metadata, tensors and places of their data, and its tensors are aligned, disjoint and
inside the file. Neither takes more than 2 s of processor time, nor more memory than 4 times the
file (on Linux). A crash leaves damaged.gguf in the folder.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import gguf_bytes as raw
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf_files import random_model

from torch_metalmm import load_gguf
from torch_metalmm.files.gguf.file import GgufFile

SECONDS, TIMES_THE_FILE, ALLOCATOR = 2, 4, 1 << 21
LOAD_EVERY = 10


class Hang(Exception):
    """More processor time than SECONDS."""


# The file, in parts, and what is done to them


def good_parts(folder: Path) -> tuple[list[bytes], list[bytes], bytes]:
    """The values, the tensor entries and the data of a small model's file."""
    path = random_model(folder / "good.gguf", "llama")
    reader = GGUFReader(path)
    content = path.read_bytes()
    fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
    ends = [f.offset for f in fields[1:]] + [reader.tensors[0].field.offset]
    values = [content[f.offset : end] for f, end in zip(fields, ends, strict=True)]
    tensors = []
    for t in reader.tensors:
        shape = [int(d) for d in reversed(t.shape)]
        tensors.append(raw.tensor(t.name, shape, t.tensor_type, t.data_offset - reader.data_offset))
    return values, tensors, content[reader.data_offset :]


NUMBERS = (0, 1, 2, 3, 31, 32, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def set_number(random: np.random.Generator, part: bytes) -> bytes:
    """Overwrite 4 or 8 bytes by a number that means something, or by one near what is there."""
    width = int(random.choice([4, 8]))
    if len(part) <= width:
        return part
    at = int(random.integers(len(part) - width))
    old = int.from_bytes(part[at : at + width], "little")
    near = old + int(random.integers(-33, 34))
    number = int(random.choice(np.array([*NUMBERS, near], object))) % 2 ** (8 * width)
    return part[:at] + number.to_bytes(width, "little") + part[at + width :]


def set_byte(random: np.random.Generator, part: bytes) -> bytes:
    at = int(random.integers(len(part)))
    return part[:at] + bytes([random.integers(256)]) + part[at + 1 :]


def move_tensor(random: np.random.Generator, part: bytes) -> bytes:
    """Another offset for a tensor: a multiple of a power of two."""
    offset = int(random.integers(2**15)) * 2 ** int(random.integers(8))
    return part[:-8] + offset.to_bytes(8, "little")


def set_type(random: np.random.Generator, part: bytes) -> bytes:
    return part[:-12] + int(random.integers(42)).to_bytes(4, "little") + part[-8:]


def set_dimension(random: np.random.Generator, part: bytes) -> bytes:
    name = int.from_bytes(part[:8], "little")
    count = int.from_bytes(part[8 + name : 12 + name], "little")
    at = 12 + name + 8 * int(random.integers(max(count, 1)))
    size = int(random.choice([0, 1, 2, 32, 64, 128, 256, 320, 512, 2**32, 2**63]))
    return part[:at] + size.to_bytes(8, "little") + part[at + 8 :]


def grow_array(random: np.random.Generator, part: bytes) -> bytes:
    """Turn a value into an array of up to 2^14 elements of one type."""
    key = int.from_bytes(part[:8], "little")
    kind, width = [(raw.U8, 1), (raw.I32, 4), (raw.F64, 8), (raw.STRING, 8)][random.integers(4)]
    count = int(random.integers(2**14))
    return raw.array(part[8 : 8 + key].decode(errors="replace"), kind, count, bytes(count * width))


Change = Callable[[np.random.Generator, bytes], bytes]
ON_VALUES: list[Change] = [set_byte, set_number, set_number, grow_array]
ON_TENSORS: list[Change] = [set_byte, set_number, move_tensor, set_type, set_dimension]


def damaged(number: int, parts: tuple[list[bytes], list[bytes], bytes]) -> bytes:
    """The file of that number."""
    random = np.random.default_rng(number)
    values, tensors, data = list(parts[0]), list(parts[1]), parts[2]
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        changes, part = [(ON_VALUES, values), (ON_TENSORS, tensors)][random.integers(2)]
        at, kind = int(random.integers(len(part))), random.integers(12)
        if kind == 0:
            part.append(part[at])
        elif kind == 1:
            part.insert(int(random.integers(len(part))), part.pop(at))
        elif kind == 2 and len(part) > 1:
            del part[at]
        elif kind == 3:
            alignment = int(random.choice([0, 1, 8, 24, 64, 4096, 2**31]))
            values.append(raw.value("general.alignment", raw.U32, alignment))
        else:
            part[at] = changes[random.integers(len(changes))](random, part[at])
    content = raw.content(values, tensors, data)
    if random.integers(16) == 0:
        content = content[: random.integers(len(content))]
    elif random.integers(16) == 0:
        content = content[:4] + set_number(random, content[4:24]) + content[24:]
    return content


# What is demanded


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Hang or MemoryError for more processor time or memory than a file of this size may take."""

    def stop(*args: object) -> None:
        raise Hang(f"more than {SECONDS} s of processor time")

    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    measured = reset.exists()
    if measured:
        reset.write_text("5")
    before = kilobytes(status, "VmRSS") if measured else 0
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = 1024 * (kilobytes(status, "VmHWM") - before) if measured else 0
    if grown > TIMES_THE_FILE * size + ALLOCATOR:
        raise MemoryError(f"{grown} bytes of memory for a file of {size}")


def kilobytes(status: Path, key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1])


def check_agreement(file: GgufFile, theirs: GGUFReader, size: int, alignment: int) -> None:
    """AssertionError where the two readers differ or tensors are not where they may be."""
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert fields.keys() == file.metadata.keys() | file.arrays.keys()
    for key, field in fields.items():
        if key in file.arrays:
            assert len(field.data) == file.arrays[key].count, key
        else:
            ours, expected = file.metadata[key], field.contents()
            assert ours == expected or (ours != ours and expected != expected), key
    assert [t.name for t in theirs.tensors] == list(file.tensors)
    for t in theirs.tensors:
        entry = file.tensors[t.name]
        assert entry.shape == tuple(int(d) for d in reversed(t.shape)), t.name
        assert GGMLQuantizationType[entry.format.upper()] == t.tensor_type, t.name
        assert (entry.offset, entry.nbytes) == (t.data_offset, int(t.n_bytes)), t.name
        block, width = GGML_QUANT_SIZES[t.tensor_type]
        assert entry.nbytes * block == int(np.prod(entry.shape, dtype=object)) * width, t.name
        assert entry.offset % alignment == 0 and entry.offset + entry.nbytes <= size, t.name
        assert file.packed(t.name).numpy().tobytes() == t.data.tobytes(), t.name
    spans = sorted((e.offset, e.offset + e.nbytes) for e in file.tensors.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "tensors overlap"


def check_file(path: Path, load: bool) -> str:
    """What became of the file; AssertionError, Hang, MemoryError or other code's error if wrong."""
    size = path.stat().st_size
    try:
        with limited(size):
            file = GgufFile(path)
    except ValueError as error:
        assert str(path) in str(error), error
        return "refused"
    check_agreement(file, GGUFReader(path), size, file.metadata.get("general.alignment", 32))
    if not load:
        return "read"
    try:
        with limited(size), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_gguf(path)
    except ValueError as error:
        assert str(path) in str(error), error
        return "read, not loaded"
    return "read and loaded"


def checks(folder: Path) -> Callable[[int], str]:
    """check_file for the file of a number, which is written into the folder."""
    parts = good_parts(folder)
    for _ in range(2):
        load_gguf(folder / "good.gguf")  # imports and caches are no file's own
    # The gguf package takes 25 ms for a vocabulary of 320 tokens, so most files have none.
    short = ([v for v in parts[0] if len(v) < 1000], *parts[1:])

    def check(number: int) -> str:
        load, path = number % LOAD_EVERY == 0, folder / "damaged.gguf"
        path.write_bytes(damaged(number, parts if load else short))
        return check_file(path, load)

    return check

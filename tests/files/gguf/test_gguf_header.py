"""GgufFile: which headers it takes, what it reads of them, and the map of the file."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    tensor,
    text,
    value,
    write,
)

from torch_metalmm.files.gguf.file import GgufFile

# Every value type at numbers that another of its size reads otherwise
VALUES = {
    "u8": (U8, 200),
    "i8": (I8, -100),
    "u16": (U16, 60000),
    "i16": (I16, -3),
    "u32": (U32, 2**32 - 1),
    "i32": (I32, -2),
    "f32": (F32, 1.5),
    "bool": (BOOL, True),
    "text": (STRING, "häß"),
    "u64": (U64, 2**63 + 1),
    "i64": (I64, -(2**62)),
    "f64": (F64, 0.1),
}


def test_every_value_type_is_read_as_the_gguf_package_does(tmp_path: Path) -> None:
    values = [value(key, kind, content) for key, (kind, content) in VALUES.items()]
    path = write(tmp_path / "x.gguf", values, [tensor("t", [4])], bytes(16))
    found, theirs = GgufFile(path).metadata, GGUFReader(path)
    for key, (_, content) in VALUES.items():
        assert found[key] == content == theirs.fields[key].contents(), key
        assert type(found[key]) is type(content), key


@pytest.mark.parametrize("kind", [U8, I16, U32, F64, STRING])
def test_arrays_are_known_by_length_and_longest_element(tmp_path: Path, kind: int) -> None:
    if kind == STRING:
        content, longest = text("a") + text("") + text("long"), 4
    else:
        longest = {U8: 1, I16: 2, U32: 4, F64: 8}[kind]
        content = bytes(3 * longest)
    path = write(tmp_path / "x.gguf", [array("a", kind, 3, content), value("b", U8, 7)])
    file = GgufFile(path)
    assert (file.arrays["a"].count, file.arrays["a"].longest) == (3, longest)
    assert file.metadata == {"b": 7}


ONE = value("key", U8, 1)
BAD_VALUES = {
    "a key twice": ([ONE, value("other", U8, 2), ONE], "the metadata key 'key' appears twice"),
    "an array and a scalar": ([ONE, array("key", U8, 0, b"")], "'key' appears twice"),
    "unknown type": ([value("key", 13, b"")], "'key' has the unknown type 13"),
    "array of arrays": ([array("key", ARRAY, 0, b"")], "elements of the unsupported type 9"),
    "long array": ([array("key", U16, 2**61, b"")], "'key' has 2305843009213693952 elements"),
    "array of 2**64 bytes": ([array("key", U64, 2**61, b"")], "'key' has 23058"),
    "long text": ([value("key", STRING, struct.pack("<Q", 2**63))], "runs past the end"),
    "text of a megabyte": (
        [value("key", STRING, "x" * (2**20 + 1))],
        "has 1048577 bytes; at most 1048576 are read",
    ),
    "key is no text": ([struct.pack("<Q", 1) + b"\xff" + ONE[11:]], "is not UTF-8 text"),
    "many values": (
        [value(f"k{i}", U8, 1) for i in range(5000)],
        "has 5000 metadata values and 0 tensors; at most 4096 and 65536 are read",
    ),
}


def aligned(kind: int, content: object) -> list[bytes]:
    return [value("general.alignment", kind, content)]


BAD_ALIGNMENTS = {
    "zero": (aligned(U32, 0), "general.alignment = 0 is not a power of two of at least 8"),
    "three": (aligned(U32, 24), "general.alignment = 24 is not a power of two"),
    "one": (aligned(U32, 1), "general.alignment = 1 is not a power of two of at least 8"),
    "four": (aligned(U32, 4), "general.alignment = 4 is not a power of two of at least 8"),
    "text": (aligned(STRING, "32"), "general.alignment has the type 8; it must be a 32-bit"),
    "signed": (aligned(I32, 32), "general.alignment has the type 5"),
    "long": (aligned(U64, 32), "general.alignment has the type 10"),
    "array": ([array("general.alignment", U32, 0, b"")], "general.alignment has the type 9"),
    "huge": (aligned(U32, 2**31), "truncated: tensor 't' ends at byte 2147483664"),
}


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_the_alignment_says_where_tensors_are(tmp_path: Path, alignment: int) -> None:
    entries = [tensor("a", [2]), tensor("b", [2], offset=alignment)]
    data = struct.pack("<2f", 1, 2).ljust(alignment, b"\x7f") + struct.pack("<2f", 3, 4)
    for length in (0, 8, 16, 24):  # headers that end where some alignments have no multiple
        values = aligned(U32, alignment) if alignment != 32 else []
        values.append(value("text", STRING, "x" * length))
        path = write(tmp_path / f"{length}.gguf", values, entries, data, alignment)
        file = GgufFile(path)
        assert file.dense("a").tolist() == [1, 2] and file.dense("b").tolist() == [3, 4]
        for theirs in GGUFReader(path).tensors:
            assert theirs.data_offset == file.tensors[theirs.name].offset


T = [4]  # 16 bytes of f32
BAD_TENSORS = {
    "twice": ([tensor("t", T), tensor("t", T, offset=32)], "the tensor 't' appears twice"),
    "no dimensions": ([tensor("t", [])], "tensor 't' has 0 dimensions"),
    "five dimensions": ([tensor("t", [1, 1, 1, 1, 4])], "tensor 't' has 5 dimensions"),
    "no rows": ([tensor("t", [0, 4])], r"tensor 't' has the shape \[0, 4\], impossible for f32"),
    "no columns": ([tensor("t", [4, 0])], r"the shape \[4, 0\], impossible for f32"),
    "no matrices": ([tensor("t", [2, 0, 4])], r"the shape \[2, 0, 4\], impossible for f32"),
    "half a block": ([tensor("t", [1, 16], 2)], r"the shape \[1, 16\], impossible for q4_0"),
    "2**64 values": ([tensor("t", [2**32, 2**32])], "truncated: tensor 't' ends at byte"),
    "beyond the file": ([tensor("t", [25])], "truncated: tensor 't' ends at byte"),
    "offset beyond it": ([tensor("t", T, offset=96)], "truncated: tensor 't' ends at byte"),
    "offset of 2**64": ([tensor("t", T, offset=2**64 - 32)], "truncated: tensor 't' ends at"),
    "unaligned": (
        [tensor("t", T, offset=4)],
        "tensor 't' has the offset 4, no multiple of the alignment 32",
    ),
    "the same bytes": ([tensor("a", T), tensor("b", T)], "the tensors 'a' and 'b' overlap"),
    "overlap": (
        [tensor("c", T, offset=32), tensor("a", [9]), tensor("b", T, offset=64)],
        "the tensors 'a' and 'c' overlap",
    ),
    "q2_0 of a fork, the last": (
        [tensor("t", [1, 384], 42)],
        "truncated: tensor 't' .*q2_0 in groups of 128",
    ),
    "q2_0 of a fork": (
        [tensor("a", [1, 128], 42), tensor("b", T, offset=32)],
        "'a' and 'b' overlap; a file of q2_0 in groups of 128",
    ),
    "inside another": (
        [tensor("a", [16]), tensor("b", [1], offset=32)],
        "the tensors 'a' and 'b' overlap",
    ),
}


# {what is wrong: (values, tensors, what is said)} of a file with 96 bytes of data
REFUSED = {f"value, {case}": (values, [], said) for case, (values, said) in BAD_VALUES.items()}
REFUSED |= {
    f"alignment, {case}": (values, [tensor("t", T)], said)
    for case, (values, said) in BAD_ALIGNMENTS.items()
}
REFUSED |= {f"tensor, {case}": ([], rows, said) for case, (rows, said) in BAD_TENSORS.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_the_file(tmp_path: Path, case: str) -> None:
    values, tensors, message = REFUSED[case]
    path = write(tmp_path / "x.gguf", values, tensors, bytes(96))
    with pytest.raises(ValueError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_signs_and_two_bits_are_read_by_their_numbers(tmp_path: Path) -> None:
    one = struct.pack("<e", 1.0)
    data = (one + bytes([0b10, *[0] * 15])).ljust(32, b"\0") + one + bytes([0xE4, *[0x55] * 15])
    entries = [tensor("a", [1, 128], 41), tensor("b", [1, 64], 42, offset=32)]
    file = GgufFile(write(tmp_path / "x.gguf", [], entries, data))
    assert file.dense("a").tolist() == [[-1, 1] + [-1] * 126]
    assert file.dense("b").tolist() == [[-1, 0, 1, 2] + [0] * 60]


def test_tensors_may_come_in_any_order_and_with_gaps(tmp_path: Path) -> None:
    tensors = [tensor("b", [8], offset=64), tensor("a", [8], offset=0)]
    path = write(tmp_path / "x.gguf", [], tensors, bytes(96))
    file = GgufFile(path)
    assert file.tensors["b"].offset - file.tensors["a"].offset == 64


# The map


def memory_and_swap() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "SwapTotal"))


@pytest.mark.skipif(sys.platform != "linux", reason="macOS charges no map against memory")
def test_a_file_larger_than_memory_opens(tmp_path: Path) -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this machine reserves memory for every private map")
    size = 2 * memory_and_swap()
    path = write(tmp_path / "x.gguf", [], [tensor("big", [size // 4]), tensor("t", T, offset=size)])
    try:
        os.truncate(path, path.stat().st_size + size + 16)  # no block is written
    except OSError:
        pytest.skip("the file system has no files of this size")
    file = GgufFile(path)
    assert file.packed("big").shape == (size,)
    last = file.packed("t")
    last[:4] = torch.tensor([0, 0, 128, 63])  # a page of its own; the file stays
    assert file.dense("t").tolist() == [1, 0, 0, 0]
    assert GgufFile(path).dense("t").tolist() == [0, 0, 0, 0]
    assert path.stat().st_blocks * 512 < 2**20


def test_writing_to_a_weight_does_not_change_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", [], [tensor("t", T)], bytes(16))
    before = path.read_bytes()
    GgufFile(path).packed("t").fill_(255)
    assert path.read_bytes() == before


def test_a_file_that_is_truncated_while_open(tmp_path: Path) -> None:
    tensors = [tensor("a", T), tensor("b", [4096], offset=4096)]
    path = write(tmp_path / "x.gguf", [], tensors, bytes(4096 + 4 * 4096))
    file = GgufFile(path)
    os.truncate(path, 8192)
    assert file.dense("a").tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"truncated to 8192 bytes while open; tensor 'b' ends at"):
        file.dense("b")


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", [], [tensor("t", T)])
    os.truncate(path, 2**32)
    script = (
        "import resource, sys; from torch_metalmm.files.gguf.file import GgufFile\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, 2 * [used + 2**30])\n"
        "try: GgufFile(sys.argv[1])\n"
        "except OSError as error: print(error)\n"
    )
    if sys.platform != "linux":
        pytest.skip("RLIMIT_AS is not enforced here")
    command = [sys.executable, "-c", script, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot map it: Cannot allocate memory" in run.stdout and str(path) in run.stdout

"""Split GGUF files, written by the gguf package: loaded as one, and what is refused of them."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import load_quietly, random_model, split, write_gguf

from torch_metalmm import load_gguf, load_packed
from torch_metalmm.files.gguf.split import open_gguf
from torch_metalmm.tools.cli import main

N = 3  # parts of a model of 20 tensors, 7 each


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("whole") / "tiny.gguf", "llama")


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    """A fresh set in a folder of its own."""
    (tmp_path / "set").mkdir()
    copy = tmp_path / "set" / "tiny.gguf"
    copy.write_bytes(whole.read_bytes())
    made = split(copy, "llama", 7)
    copy.unlink()
    assert [p.name for p in made] == [f"tiny-split-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return made


def same_models(one: Any, other: Any) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_any_part_and_the_folder_load_the_whole(whole: Path, parts: list[Path]) -> None:
    reference, tokenizer, _ = load_quietly(whole)
    for given in (*parts, parts[0].parent):
        model, tokens, warned = load_quietly(given)
        assert warned == []
        same_models(model, reference)
        assert tokens("the man").input_ids == tokenizer("the man").input_ids
        assert str(model.config.to_dict()) == str(reference.config.to_dict())


def test_every_tensor_is_a_view_of_its_own_part(parts: list[Path]) -> None:
    file = open_gguf(parts[1])
    found = {}
    for path in parts:
        reader = gguf.GGUFReader(path)
        found |= {t.name: np.array(t.data).tobytes() for t in reader.tensors}
    assert file.tensors.keys() == found.keys() and len(found) == 20
    for name, data in found.items():
        assert file.packed(name).numpy().tobytes() == data
        assert not file.packed(name).numpy().flags.owndata


def test_a_first_part_without_tensors(whole: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(whole.read_bytes())
    made = split(copy, "llama", 7, empty_first=True)
    assert len(made) == 4 and gguf.GGUFReader(made[0]).tensors == []
    same_models(load_quietly(made[2])[0], load_quietly(whole)[0])


@pytest.mark.filterwarnings("ignore")
def test_the_command_takes_the_folder(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(parts[0].parent), "--output", str(out)]) == 0
    same_models(load_packed(out)[0], load_quietly(whole)[0])


def refuses(path: Path, blamed: Path, message: str) -> None:
    with pytest.raises(ValueError, match=f"cannot read {re.escape(str(blamed))}: {message}"):
        load_gguf(path)


def set_value(path: Path, key: str, old: int, new: int) -> None:
    """Overwrite a value of the metadata by another of its type."""
    field = gguf.GGUFReader(path).fields[key]
    value = field.parts[field.data[0]]
    assert value[0] == old
    content = bytearray(path.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    content[at : at + value.nbytes] = new.to_bytes(value.nbytes, "little", signed=new < 0)
    path.write_bytes(content)


def test_a_missing_part(parts: list[Path]) -> None:
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        refuses(path, path, "it is one of 3 parts, and tiny-split-00002-of-00003.gguf is missing")


def test_a_part_that_is_there_twice(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    refuses(parts[0], parts[1], "it is part 3, and by its name part 2")


def test_a_part_under_another_name(parts: list[Path]) -> None:
    message = r"it is part 2 of 3, but its name does not end in -00002-of-00003.gguf"
    for name in ("tiny.gguf", "tiny-00003-of-00003.gguf", "tiny-00002-of-00004.gguf"):
        refuses(parts[1].rename(parts[1].with_name(name)), parts[1].with_name(name), message)
        parts[1].with_name(name).rename(parts[1])


@pytest.mark.parametrize(
    ("key", "old", "new", "message"),
    [
        ("split.count", 3, 4, "split.count = 4, but the first part has 3: another model's"),
        ("split.count", 3, 0, "split.count = 0, but the first part has 3: another model's"),
        ("split.tensors.count", 20, 19, "split.tensors.count = 19, but the first part has 20"),
        ("split.tensors.count", 20, -1, "split.tensors.count = -1, which is no count"),
        ("split.no", 2, 0, "it is part 1, and by its name part 3"),
    ],
)
def test_parts_that_contradict_each_other(
    parts: list[Path], key: str, old: int, new: int, message: str
) -> None:
    set_value(parts[2], key, old, new)
    refuses(parts[0], parts[2], message)


def test_a_count_that_the_tensors_contradict(parts: list[Path]) -> None:
    for path in parts:
        set_value(path, "split.tensors.count", 20, 21)
    message = "split.tensors.count = 21, but its 3 parts have 20 tensors"
    refuses(parts[2], parts[0], message)


def test_counts_that_are_no_numbers_or_absent(whole: Path, tmp_path: Path) -> None:
    tensors = {"output_norm.weight": (np.ones(8, np.float32), "f32")}
    for extra, message in (
        ({"split.count": "two"}, "split.count = 'two', which is no count"),
        ({"split.count": 2}, "split.no = None, which is no count"),
        ({"split.count": 1, "split.no": 0}, ""),
    ):
        path = write_gguf(tmp_path / "x-00001-of-00002.gguf", "llama", tensors, {}, extra)
        if message:
            refuses(path, path, message)
        else:
            assert list(open_gguf(path).tensors) == ["output_norm.weight"]


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    names = [[t.name for t in gguf.GGUFReader(p).tensors] for p in parts]
    twin = next(n for n in names[0] if any(len(n) == len(m) for m in names[2]))
    other = next(m for m in names[2] if len(m) == len(twin)).encode()
    content = parts[2].read_bytes()
    assert content.count(other) == 1
    parts[2].write_bytes(content.replace(other, twin.encode()))
    refuses(parts[0], parts[2], f"its tensor '{twin}' is also in {parts[0].name}")


def test_parts_of_two_models(parts: list[Path], tmp_path: Path) -> None:
    """Of equal counts and names, which another architecture gives away, or tensors that lack."""
    extra = {"split.count": 3, "split.no": 2, "split.tensors.count": 20}
    tensors = {f"spare.{i}": (np.ones(8, np.float32), "f32") for i in range(6)}
    path = write_gguf(parts[2], "qwen2", tensors, {}, extra, tokenizer=False)
    refuses(parts[0], path, "it is of a qwen2 model, but the first part of a llama")
    write_gguf(parts[2], "llama", tensors, {}, extra, tokenizer=False)
    with pytest.raises(ValueError, match=r"has no tensor for the model's"):
        load_gguf(parts[0])


def test_truncated_parts(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    for keep, message in ((len(content) - 1, "it is truncated"), (10, "it is shorter than a GGUF")):
        parts[1].write_bytes(content[:keep])
        refuses(parts[2], parts[1], message)
    parts[1].write_bytes(b"GGML" + content[4:])
    refuses(parts[0], parts[1], "it does not start with the GGUF magic")


def test_a_part_that_is_truncated_while_open(parts: list[Path]) -> None:
    file = open_gguf(parts[0])
    last = max(gguf.GGUFReader(parts[2]).tensors, key=lambda t: t.data_offset)
    with parts[2].open("r+b") as opened:
        opened.truncate(struct.calcsize("<4sIQQ"))
    with pytest.raises(ValueError, match=f"{re.escape(str(parts[2]))}: it was truncated to 24"):
        file.packed(last.name)


def test_a_folder_of_two_models(whole: Path, parts: list[Path]) -> None:
    (parts[0].parent / "other.gguf").write_bytes(whole.read_bytes())
    message = r"has 2 GGUF models; give the path of one: other.gguf, tiny-split-00001-of-00003.gguf"
    with pytest.raises(ValueError, match=message):
        load_gguf(parts[0].parent)


def test_a_folder_of_two_sets_of_one_name(parts: list[Path], whole: Path) -> None:
    """Which are two models, though their names differ only in how many parts there are."""
    folder = parts[0].parent
    for part in parts:
        part.rename(folder / part.name.replace("tiny-split", "tiny"))
    copy = folder / "tiny.gguf"
    copy.write_bytes(whole.read_bytes())
    for part in split(copy, "llama", 10):
        part.rename(folder / part.name.replace("tiny-split", "tiny"))
    copy.unlink()
    assert len(list(folder.iterdir())) == 5
    with pytest.raises(ValueError, match="has 2 GGUF models; give the path of one: tiny-00001-of"):
        load_gguf(folder)


@pytest.mark.filterwarnings("ignore")
def test_the_command_replaces_no_part_of_its_source(
    parts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = [part.read_bytes() for part in parts]
    for source in (parts[0], parts[0].parent):
        command = ["quantize", str(source), "--output", str(parts[1]), "--format", "q8_0"]
        assert main([*command, "--force"]) == 1
        assert "00002-of-00003.gguf is one of the 3 files of the source" in capsys.readouterr().err
    assert [part.read_bytes() for part in parts] == before

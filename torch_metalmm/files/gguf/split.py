"""The parts of a split GGUF file, read as one.

llama.cpp and the gguf package write models as `name-00001-of-00003.gguf` and so on. Every part
states split.no (from 0), split.count and split.tensors.count (of all parts together); the first
alone has the model's metadata.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor

from .file import GgufFile

_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
# The name of a part.
PART = re.compile(r"(?P<model>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Whether open_gguf is to read it: a file, or a folder of GGUF files without a config.json."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    return path.is_file()


def model_of(name: str) -> tuple[str, str | None]:
    """The name that all files of one model share, and how many parts it has, if split."""
    split = PART.fullmatch(name)
    return (split["model"], split["parts"]) if split else (name, None)


def part_names(name: str) -> list[str]:
    """The names of all parts of the model whose part, or whose only file, has this name."""
    split = PART.fullmatch(name)
    if split is None:
        return [name]
    model, parts = split["model"], int(split["parts"])
    return [f"{model}-{i:05}-of-{parts:05}.gguf" for i in range(1, parts + 1)]


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """The GGUF file; a split one as a whole, given any of its parts or a folder of only one model.

    The errors of GgufFile, and ValueError: a folder of several models, or a set of parts that is
    not one model: a part is missing or twice there, contradicts its name or the other parts, or has
    a tensor that another part has, too.
    """
    path = Path(path)
    if path.is_dir():
        path = _only_model(path)
    file = GgufFile(path)
    parts = _number(file, _COUNT)
    if parts <= 1:
        return file
    return SplitFile(_paths(file, parts))


def part_paths(path: str | os.PathLike[str]) -> list[Path]:
    """The files that open_gguf reads as one. Its errors."""
    file = open_gguf(path)
    return file.parts if isinstance(file, SplitFile) else [Path(file.path)]


class SplitFile(GgufFile):
    """The parts of a split file as one: the metadata of the first, the tensors of all of them."""

    def __init__(self, parts: list[Path]) -> None:
        """The errors of GgufFile for every part. ValueError: the parts are not one model's."""
        super().__init__(parts[0])
        self.parts = parts
        _check_part(self, self, 0, len(parts))
        self._homes: dict[str, GgufFile] = {}  # by the names of the tensors of other parts
        for number, path in enumerate(parts[1:], 1):
            part = GgufFile(path)
            _check_part(part, self, number, len(parts))
            for name in part.tensors.keys() & self.tensors.keys():
                other = self._homes.get(name, self).path
                raise part.error(f"its tensor {name!r} is also in {os.path.basename(other)}")
            self._homes |= dict.fromkeys(part.tensors, part)
            self.tensors |= part.tensors
        stated = _number(self, _TENSORS)
        if stated != len(self.tensors):
            raise self.error(
                f"{_TENSORS} = {stated}, but its {len(parts)} parts have "
                f"{len(self.tensors)} tensors"
            )

    def packed(self, name: str) -> Tensor:
        home = self._homes.get(name)
        return super().packed(name) if home is None else home.packed(name)


def _only_model(folder: Path) -> Path:
    """The one GGUF file, or the first part there is of the one split file, in the folder."""
    models: dict[tuple[str, str | None], Path] = {}  # by its name, and how many parts it has
    for file in sorted(folder.glob("*.gguf")):
        models.setdefault(model_of(file.name), file)
    if not models:
        raise IsADirectoryError(f"{folder} is a folder without GGUF files, not a GGUF file")
    if len(models) > 1:
        found = ", ".join(file.name for file in list(models.values())[:4])
        raise ValueError(f"{folder} has {len(models)} GGUF models; give the path of one: {found}")
    return next(iter(models.values()))


def _paths(file: GgufFile, parts: int) -> list[Path]:
    """The paths of all parts. ValueError: the file's name is not that of its part, or one lacks."""
    path, number = Path(file.path), _number(file, _NO)
    name = PART.fullmatch(path.name)
    if name is None or (int(name["part"]), int(name["parts"])) != (number + 1, parts):
        raise file.error(
            f"it is part {number + 1} of {parts}, but its name does not end in "
            f"-{number + 1:05}-of-{parts:05}.gguf, so that the other parts cannot be found"
        )
    paths = [path.with_name(part) for part in part_names(path.name)]
    for part in paths:
        if not part.is_file():
            raise file.error(f"it is one of {parts} parts, and {part.name} is missing")
    return paths


def _check_part(part: GgufFile, first: GgufFile, number: int, parts: int) -> None:
    """ValueError for a part that is not this one, or not of the model that the first part is of."""
    stated = _number(part, _NO)
    if stated != number:
        raise part.error(f"it is part {stated + 1}, and by its name part {number + 1}")
    for key, wanted in ((_COUNT, parts), (_TENSORS, _number(first, _TENSORS))):
        if (found := _number(part, key)) != wanted:
            raise part.error(f"{key} = {found}, but the first part has {wanted}: another model's")
    kind = part.metadata.get("general.architecture", first.architecture)
    if kind != first.architecture:
        raise part.error(f"it is of a {kind} model, but the first part of a {first.architecture}")


def _number(file: GgufFile, key: str) -> int:
    value = file.metadata.get(key, 0 if key == _COUNT else None)
    if not isinstance(value, int) or value < 0:
        raise file.error(f"{key} = {value!r}, which is no count")
    return value

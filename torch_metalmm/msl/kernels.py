"""The kernels of metal/library by their names: the file of each, and what makes it alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

METAL = Path(__file__).resolve().parents[2] / "metal"


def structs_of(metal: Path = METAL) -> dict[str, str]:
    """{name of formats.def: its decode struct}."""
    rows = re.findall(r"^MM_\w+ *\((\w+), *(\w+)", (metal / "formats.def").read_text(), re.M)
    return dict(rows)


@dataclass(frozen=True)
class Shader:
    """A file of metal/library, for one format alone where its kernels have formats.

    dtype: "" for the kernels of each.
    """

    file: Path
    format: str = ""
    struct: str = ""  # the format's struct
    dtype: str = ""

    @property
    def name(self) -> str:
        return "_".join(filter(None, (self.file.stem, self.format, self.dtype)))

    @property
    def _only(self) -> dict[str, str]:
        only = {"FORMAT": self.format, "STRUCT": self.struct, "DTYPE": self.dtype}
        return {f"MM_ONLY_{name}": value for name, value in only.items() if value}

    @property
    def text(self) -> str:
        """The file, told to make the kernels of the format and the dtype alone."""
        lines = [f"#define {name} {value}\n" for name, value in self._only.items()]
        return f'{"".join(lines)}#include "{self.file}"\n'

    @property
    def opening(self) -> str:
        """The headers that the file begins with. They ask whether a format or a dtype is made
        alone, not which: all those have this text."""
        begin = re.match(r'(?:\s|//.*\n|#include ".*"\n)*', self.file.read_text())
        names = re.findall(r'^#include "(.*)"$', begin[0] if begin else "", re.M)
        files = (os.path.normpath(self.file.parent / name) for name in names)
        lines = [f"#define {name}\n" for name in self._only]
        return "".join([*lines, *(f'#include "{file}"\n' for file in files)])


def shader_of(kernel: str, metal: Path = METAL) -> Shader:
    """ValueError: no file of a folder like metal/ begins the name of that kernel."""
    files = [f for f in (metal / "library").rglob("*.metal") if kernel.startswith(f"{f.stem}_")]
    if not files:
        raise ValueError(f"kernel {kernel!r}: no file of {metal / 'library'} begins its name")
    file = max(files, key=lambda f: len(f.stem))
    name = kernel.removeprefix(f"{file.stem}_").rpartition("_")[0]
    structs = structs_of(metal)
    return Shader(file, name, structs[name]) if name in structs else Shader(file)


def alone(kernel: str, metal: Path = METAL) -> Shader:
    """The Shader that makes this kernel and no other. ValueError as shader_of."""
    return replace(shader_of(kernel, metal), dtype=kernel.rpartition("_")[2])

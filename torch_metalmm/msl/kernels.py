"""The kernels of metal/library by their names: the file of each, and what makes it alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

METAL = Path(__file__).resolve().parents[2] / "metal"
_STRUCT = re.compile(r"^MM_\w+ *\((\w+), *(\w+)", re.M)


@dataclass(frozen=True)
class Shader:
    """A file of metal/library, for one format alone where its kernels have formats."""

    file: Path
    format: str = ""
    struct: str = ""  # of the format

    @property
    def name(self) -> str:
        return "_".join(filter(None, (self.file.stem, self.format)))

    @property
    def defines(self) -> str:
        """What is before the file, so that it makes the kernels of the format alone."""
        only = {"FORMAT": self.format, "STRUCT": self.struct} if self.format else {}
        return "".join(f"#define MM_ONLY_{name} {value}\n" for name, value in only.items())


def shader_of(kernel: str, metal: Path = METAL) -> Shader:
    """ValueError: no file of a folder like metal/ begins the name of that kernel."""
    files = [f for f in (metal / "library").rglob("*.metal") if kernel.startswith(f"{f.stem}_")]
    if not files:
        raise ValueError(f"kernel {kernel!r}: no file of {metal / 'library'} begins its name")
    file = max(files, key=lambda f: len(f.stem))
    name = kernel.removeprefix(f"{file.stem}_").rpartition("_")[0]
    structs = dict(_STRUCT.findall((metal / "formats.def").read_text()))
    return Shader(file, name, structs[name]) if name in structs else Shader(file)

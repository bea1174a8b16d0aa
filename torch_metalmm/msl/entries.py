"""The shaders of plain matmul strategies, written from their rows of metal/strategies.def.

python -m torch_metalmm.msl.entries      # writes metal/library/matmul/*.metal
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

METAL = Path(__file__).resolve().parents[2] / "metal"
_SLOTS = r"kBind(Matmul|Gemv|Arranged|GemvArranged|Experts)"
_ROW = re.compile(rf"^MM_STRATEGY\((\w+), *Matmul, *\w+, *{_SLOTS}, *(\w+)\)", re.M)
_COLUMNS = 100  # columns of a line of clang-format


def header_of(kernel: str, metal: Path) -> str:
    """The file of metal/kernels/ that defines `kernel`. ValueError: none does, or several."""
    define = re.compile(rf"^(?:struct {kernel} \{{|using {kernel} =)", re.M)
    found = [f.name for f in (metal / "kernels").glob("*.h") if define.search(f.read_text())]
    if len(found) != 1:
        raise ValueError(
            f"{kernel}: a Kernel of strategies.def; one header of metal/kernels must "
            f"define it, these do: {', '.join(sorted(found)) or 'none'}"
        )
    return found[0]


def shaders(metal: Path = METAL) -> Iterator[tuple[Path, str]]:
    """The file and the text of every strategy that has a Kernel in its row."""
    for name, slots, kernel in _ROW.findall((metal / "strategies.def").read_text()):
        entry = re.sub(r"(?=[A-Z])", "_", slots).upper()
        macro, each = (
            "#define MM_FORMAT(name, Struct)",
            f"MM_EACH_DTYPE(MM{entry}, {name}, name, Struct, {kernel})",
        )
        line = f"{macro} {each}"
        if len(line) > _COLUMNS:
            line = f"{macro} \\\n  {each}"
        yield (
            metal / "library" / "matmul" / f"{name}.metal",
            (
                f"// {name} of every format and dtype.\n"
                f'#include "../../kernels/{header_of(kernel, metal)}"\n\n'
                '#include "../../entry.h"\n#include "../../formats/all.h"\n\n'
                f'{line}\n#include "../../formats/each.h"\n'
            ),
        )


if __name__ == "__main__":
    for file, text in shaders():
        file.write_text(text)

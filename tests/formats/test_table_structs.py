"""A struct that formats.def names and an engine lacks, or has in another size, is an error of the
compiler at that row: taken away, one after the other, from a copy of the sources."""

from __future__ import annotations

import re
import shutil
from operator import itemgetter
from pathlib import Path

import pytest
from backends import CASES
from places import ROOT

from torch_metalmm.msl.build import LANGUAGE, zig

TEXT = (ROOT / "metal" / "formats.def").read_text()
STRUCTS = dict(re.findall(r"^MM_(?:DENSE|BLOCK|AFFINE)\s*\((\w+), *(\w+),", TEXT, re.M))
ENGINES = {"Metal": "metal/formats", "CPU": "csrc/cpu/codecs"}


def errors(root: Path, engine: str) -> str:
    """What the compiler says of every struct of an engine, under a copy of metal/ and csrc/."""
    if engine == "Metal":
        file = root / "all.cpp"
        file.write_text('#include <metal_stdlib>\n#include "entry.h"\n#include "formats/all.h"\n')
        command = ["clang", *LANGUAGE, f"-I{root / 'metal'}", "-fsyntax-only", str(file)]
    else:
        # zig c++ has the headers of a C++ library, and takes no -fsyntax-only.
        file, out = root / "csrc" / "cpu" / "isa.cpp", root / "isa.o"
        command = ["c++", "-std=c++17", "-DMM_ISA=scalar", "-DMM_SCALAR", "-c", str(file)]
        command += [f"-I{root / 'csrc'}", f"-I{root}"]
        command += ["-o", str(out)]
    done = zig(*command, "-w", "-ferror-limit=0")
    assert bool(done.returncode) == bool(done.stderr), done
    return done.stderr


def named(text: str) -> set[str]:
    """The formats of the rows of formats.def that errors are at."""
    return set(re.findall(r"formats\.def:\d+:\d+: error: .*\n.*\| MM_\w+ *\((\w+),", text))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "metal", root / "metal")
    for folder in ("cpu", "plan"):
        shutil.copytree(ROOT / "csrc" / folder, root / "csrc" / folder)
    return root


def test_every_row_has_a_struct() -> None:
    assert len(STRUCTS) == len(re.findall(r"^MM_", TEXT, re.M))


AFFINE = {name for name in STRUCTS if name.startswith("affine")}
# The struct or alias that is taken away, and the rows that lack it: affine ones share a template.
MISSING = {struct: {name} for name, struct in STRUCTS.items() if name not in AFFINE}
MISSING |= {"Affine": AFFINE}
BUILT_ON = {("Metal", "Q4_0"): {"iq4_nl"}}  # whose blocks are read as those of q4_0


# A compilation without every second struct, and one without the others.
HALVES = [tuple(MISSING)[::2], tuple(MISSING)[1::2]]


@pytest.mark.parametrize(
    "structs", [(s,) for s in MISSING] if CASES == "all" else HALVES, ids=itemgetter(0)
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_struct_is_named(engine: str, structs: tuple[str, ...], sources: Path) -> None:
    """Its rows of the table, and no other."""
    definition = re.compile(rf"^(struct|using) ({'|'.join(structs)}) (?=[:={{])", re.M)
    headers = {h: h.read_text() for h in (sources / ENGINES[engine]).rglob("*.h")}
    found = [name for text in headers.values() for _, name in definition.findall(text)]
    assert sorted(found) == sorted(structs)
    for header, whole in headers.items():
        header.write_text(definition.sub(r"\1 Elsewhere\2 ", whole))
    said = errors(sources, engine)
    for header, whole in headers.items():
        header.write_text(whole)
    lacking = (MISSING[s] | BUILT_ON.get((engine, s), set()) for s in structs)
    assert named(said) == set().union(*lacking)


def changed(sources: Path, engine: str, row: str, to: str) -> str:
    """What the compiler says where the table has another row."""
    table = sources / "metal" / "formats.def"
    assert TEXT.count(row) == 1
    table.write_text(TEXT.replace(row, to))
    found = errors(sources, engine)
    table.write_text(TEXT)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_another_size_is_named(engine: str, sources: Path) -> None:
    """A row of the table with other bytes than its struct."""
    found = changed(sources, engine, "256, 210, ", "256, 212, ")
    assert named(found) == {"q6_k"}
    assert "static assertion failed" in found


@pytest.mark.parametrize(
    ("piece", "weave", "why"), [(16, 128, "== piece"), (32, 64, "* weave"), (32, 32, "* weave")]
)
def test_another_piece_is_named(piece: int, weave: int, why: str, sources: Path) -> None:
    """A row of the table with another piece or weave than its struct in metal/."""
    found = changed(sources, "Metal", "210,  2,  32, 128,", f"210,  2,  {piece}, {weave},")
    assert f"FormatCheck<metalmm::Q6_K, {piece}, {weave}>" in found and why in found

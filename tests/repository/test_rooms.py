"""The house: rooms of few files, and imports that point one way."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.quick

MOST = 15  # files of a folder


def tracked(*folders: str) -> list[Path]:
    """The files of these folders that git knows, as paths from ROOT."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    command = ["git", "ls-files", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (ROOT / name).exists()]


def modules(folder: str) -> list[Path]:
    return [file for file in tracked(folder) if file.suffix == ".py"]


def dotted(file: Path) -> str:
    """The name that a file of a package is imported by."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> Iterator[str]:
    """Every dotted name that may be a module which the file imports, inside functions, too."""
    package = file.parent.parts
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def in_order(imports: dict[str, set[str]]) -> list[str]:
    """Modules, each behind what it imports. AssertionError: some import each other."""
    try:
        return list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_no_room_is_crowded() -> None:
    files = Counter(str(file.parent) for file in tracked("tests", "bench"))
    assert files and not {room: count for room, count in files.items() if count > MOST}


def test_no_two_tests_have_one_name() -> None:
    """pytest imports tests, and tests import helpers, by the name of the file alone."""
    names = Counter(f.stem for f in modules("tests"))
    assert names and not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize(
    ("folder", "above"), [("torch_metalmm", {"bench", "tests"}), ("bench", {"tests"})]
)
def test_nothing_imports_what_is_above_it(folder: str, above: set[str]) -> None:
    """Neither by the folder's name nor, for the tests, by the plain names of their files."""
    outside = above | {f.stem for f in modules("tests")} | {"support"}
    found = {str(f): {n.split(".")[0] for n in imported(f)} & outside for f in modules(folder)}
    assert found and not {file: names for file, names in found.items() if names}


def test_the_benchmark_has_no_cycle_of_imports() -> None:
    files = {dotted(file): file for file in modules("bench")}
    imports = {name: {*imported(file)} & {*files} - {name} for name, file in files.items()}
    order = in_order(imports)
    assert order.index("bench.timing") < order.index("bench.devices") < len(files)


def test_a_cycle_is_named() -> None:
    with pytest.raises(AssertionError, match="^(a imports b imports a|b imports a imports b)$"):
        in_order({"a": {"b"}, "b": {"a"}, "c": {"a"}})

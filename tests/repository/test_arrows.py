"""The way that imports go between the rooms of the package, in bench and in tests, read from the
text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = "torch_metalmm"

# {room: what its modules may import beside those of the room}. "" is the package itself.
LEAVES = {"_C", "ops", "late", "extras", "engines"}
ARROWS: dict[str, set[str]] = {
    **dict.fromkeys(LEAVES, {"_C"}),
    "formats": LEAVES,
    "nn": {"formats", *LEAVES},
    "models": {"nn", "formats", *LEAVES},
    "files": {"models", "nn", "formats", *LEAVES},
    "hf": {"files", "models", "nn", "formats", *LEAVES},
    "tools": {"bench", "", "hf", "files", "models", "nn", "formats", *LEAVES},
    "msl": {"_C"},
    "testing": {"msl", "_C"},
    "__main__": {"tools"},
    "": {"hf", "files", "models", "nn", "formats", *LEAVES},
}
# A link to bench/, for the wheel: its modules are above the package, and one of tools calls them.
CALLS_BENCH = f"{PACKAGE}.tools.bench"


def modules(folder: str) -> dict[str, Path]:
    """{dotted name: file} of a folder of the repository."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(text: str, package: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """What a module in `package` imports: the dotted names that each import may mean.

    "from a import b" may mean a.b, if b is a module, else a: in this order. Imports inside
    functions and for type checkers count: a module imported late is needed all the same.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def graph(folder: str) -> dict[str, set[str]]:
    """{module: what it imports}: modules of the package and of bench, of others the first part."""
    known = modules(PACKAGE) | modules("bench")
    arrows = {}
    for name, file in modules(folder).items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        targets = set()
        for names in imported(file.read_text(), package):
            target = next((n for n in names if n in {*known, f"{PACKAGE}._C"}), names[-1])
            ours = target in known or target.split(".")[0] == PACKAGE
            targets.add(target if ours else target.split(".")[0])
        arrows[name] = targets - {name}
    return arrows


def room(name: str) -> str:
    """The room of a module of the package; a module beside the rooms is one of its own."""
    return f"{name}.".split(".")[1]


def test_the_arrows_of_the_package() -> None:
    arrows = graph(PACKAGE)
    wrong = [
        f"{name} imports {target}: not from {room(name)} to {room(target)}"
        for name, targets in arrows.items()
        for target in sorted(targets)
        if target.split(".")[0] == PACKAGE
        and room(target) not in {room(name), *ARROWS.get(room(name), ())}
    ]
    assert wrong == []
    TopologicalSorter(arrows).prepare()  # CycleError: modules that import each other
    calling = [name for name, to in arrows.items() if any(room(t) == "bench" for t in to)]
    assert calling == [CALLS_BENCH]
    rooms = {room(name) for name in arrows}
    assert rooms == ARROWS.keys() - {"_C"}  # every row of the table is a room that exists


def test_the_benchmark_has_no_cycle_of_imports() -> None:
    arrows = graph("bench")
    assert "bench.timing" in arrows["bench.devices"]
    TopologicalSorter(arrows).prepare()


@pytest.mark.parametrize(("folder", "above"), [(PACKAGE, {"bench", "tests"}), ("bench", {"tests"})])
def test_nothing_imports_what_is_above_it(folder: str, above: set[str]) -> None:
    """Neither by the folder's name nor, for the tests, by the plain names of their files."""
    outside = above | {f.stem for f in modules("tests").values()} | {"support"}
    found = {name: {t.split(".")[0] for t in to} & outside for name, to in graph(folder).items()}
    assert found and not {name: names for name, names in found.items() if names}

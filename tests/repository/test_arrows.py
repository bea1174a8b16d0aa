"""The rooms of the package and the way that its imports go between them, read from the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from imports import cycles, imported
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
OTHERS = ("tests", "bench")  # what reads the package and is not read by it
# A link to bench/, for the wheel: its modules are above the package, and one of tools calls them.
CALLS_BENCH = f"{PACKAGE}.tools.bench"


def modules(root: Path) -> dict[str, Path]:
    """{dotted name: file} of the package."""
    found = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file imports: those of the package, else the first part of the name."""
    parts = name.split(".")
    package = parts if file.name == "__init__.py" else parts[:-1]
    ours = {*known, f"{PACKAGE}._C"}
    for names in imported(file.read_text(), package):
        target = next((n for n in names if n in ours), names[-1])
        yield target if target.split(".")[0] == PACKAGE else target.split(".")[0]


def room(name: str) -> str:
    """The room of a module of the package; a module beside the rooms is one of its own."""
    return f"{name}.".split(".")[1]


def graph(root: Path) -> dict[str, set[str]]:
    known = modules(root)
    return {name: set(imports(name, file, known)) - {name} for name, file in known.items()}


def problems(root: Path) -> list[str]:
    """What is wrong with the imports of the package under `root`."""
    found = []
    arrows = graph(root)
    for name, targets in arrows.items():
        for target in sorted(targets):
            if target in OTHERS:
                found.append(f"{name} imports {target}")
            elif target.split(".")[0] != PACKAGE:
                continue
            elif room(target) not in {room(name), *ARROWS.get(room(name), ())}:
                found.append(f"{name} imports {target}: not from {room(name)} to {room(target)}")
    found += [f"cycle: {' '.join(cycle)}" for cycle in cycles(arrows)]
    return found


def test_the_arrows_of_the_package() -> None:
    assert problems(ROOT) == []
    calling = [name for name, to in graph(ROOT).items() if any(room(t) == "bench" for t in to)]
    assert calling == [CALLS_BENCH]
    rooms = {room(name) for name in modules(ROOT)}
    assert rooms == ARROWS.keys() - {"_C"}  # every row of the table is a room that exists

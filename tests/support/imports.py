"""What Python files import, read from their text, and the modules that import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence


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


def cycles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules of which each reaches each other."""
    reached: dict[str, set[str]] = {}
    for name in arrows:
        seen: set[str] = set()
        left = list(arrows[name])
        while left:
            if (at := left.pop()) not in seen:
                seen.add(at)
                left += arrows.get(at, ())
        reached[name] = seen
    loops = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in arrows
        if name in reached[name]
    }
    return [list(loop) for loop in sorted(loops)]

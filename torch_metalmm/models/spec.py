"""The format of each weight of a model: a name, patterns, or a function of the caller's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .experts import Site, Sites, Stack
from .mixtures import resolve

Spec = str | Mapping[str, str | None] | Callable[[str, nn.Module], str | None]
Filter = Callable[[str, nn.Module], bool]


def told(site: Site) -> tuple[str, nn.Module]:
    """(name, module) of a site for a function of the caller: a stack has its module of experts."""
    name, module = site
    return name, module.home.module if isinstance(module, Stack) else module


class Patterns:
    """{pattern: format} as a choice; remembers which patterns matched."""

    def __init__(self, spec: Mapping[str, str | None]) -> None:
        self.rules: list[tuple[str, Callable[[str], object], str | None]] = []
        for pattern, format in spec.items():
            name = None if format is None else resolve(format)
            self.rules.append((pattern, _matcher(pattern), name))
        self.used: set[str] = set()

    def __call__(self, sites: Sites) -> str | None:
        hits = [
            (pattern, format)
            for pattern, match, format in self.rules
            if any(match(name) for site in sites for name in _names(site))
        ]
        self.used.update(pattern for pattern, _ in hits)
        return hits[0][1] if hits else None

    def unused(self) -> list[str]:
        return [pattern for pattern, _, _ in self.rules if pattern not in self.used]


def _names(site: Site) -> tuple[str, ...]:
    """The names that a pattern may match."""
    name, module = site
    return (name, name.rpartition(".")[0]) if isinstance(module, Stack) else (name,)


def _matcher(pattern: str) -> Callable[[str], object]:
    if not pattern.startswith("re:"):
        return lambda name: fnmatchcase(name, pattern)
    try:
        return re.compile(pattern[3:]).fullmatch
    except re.error as error:
        raise ValueError(f"spec: {pattern!r} is not a regular expression: {error}") from None


def chooser_of(spec: Any) -> Callable[[Sites], str | None]:
    """The spec as a function from the layers that share a weight to the format it gets."""
    if isinstance(spec, str):
        name = resolve(spec)
        return lambda sites: name
    if isinstance(spec, Mapping):
        return Patterns(spec)
    if callable(spec):
        return lambda sites: _asked(spec, sites)
    raise TypeError(f"spec must be a format name, a dict or a callable, got {type(spec).__name__}")


def _asked(spec: Callable[[str, nn.Module], Any], sites: Sites) -> str | None:
    asked: dict[str, str] = {}
    for name, module in map(told, sites):
        choice = spec(name, module)
        if isinstance(choice, str):
            asked[resolve(choice)] = name
        elif choice is not None:
            raise TypeError(f"spec gives {name} {choice!r}; it must be a format name or None")
    if len(asked) > 1:
        given = ", ".join(f"{name} {format}" for format, name in asked.items())
        raise ValueError(f"one weight is shared, but spec gives {given}")
    return next(iter(asked), None)

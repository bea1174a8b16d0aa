"""Shapes of the weights of real models, by name, and the parsing of lists from the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """W[N, K] of one layer."""

    name: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


NAMED = {
    s.name: s
    for s in (
        Shape("tiny", 512, 1024),
        Shape("attn", 4096, 4096),  # q and o of Llama 7B and 8B
        Shape("kv", 1024, 4096),  # Llama 8B
        Shape("up", 11008, 4096),  # Llama 7B
        Shape("down", 4096, 11008),
        Shape("head", 32000, 4096),
        Shape("up-8b", 14336, 4096),  # Llama 8B
        Shape("down-8b", 4096, 14336),
        Shape("head-8b", 128256, 4096),
    )
}
BY_SIZE = {str(s): s for s in NAMED.values()}


def parse_shape(text: str) -> Shape:
    """A name of NAMED, or NxK. ValueError: anything else."""
    text = text.strip().lower().replace("×", "x")
    if text in NAMED:
        return NAMED[text]
    if text in BY_SIZE:
        return BY_SIZE[text]
    n, x, k = text.partition("x")
    if not (x and n.isdigit() and k.isdigit() and int(n) > 0 and int(k) > 0):
        raise ValueError(f"shape {text!r}; must be NxK or one of {', '.join(NAMED)}")
    return Shape(text, int(n), int(k))


def parse_ints(text: str, least: int = 1) -> tuple[int, ...]:
    """The integers of "1,4,8-10,8k", each once; k is 1024. ValueError: anything else, or less."""
    out: list[int] = []
    for part in text.lower().split(","):
        found = re.fullmatch(r"(\d+)(k?)(?:-(\d+))?", part.strip())
        first = int(found[1]) * (1024 if found[2] else 1) if found else -1
        numbers = range(first, int(found[3] or first) + 1) if found else range(0)
        if first < least or not numbers:
            raise ValueError(
                f"{part!r}; must be whole numbers of at least {least}, as 4, 8k or 1-8"
            )
        out.extend(numbers)
    return tuple(dict.fromkeys(out))


def parse_product(option: str, text: str, names: str) -> tuple[int, ...]:
    """The integers of "32x8x128", as many as `names` has. ValueError: anything else."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != len(names.split("x")) or not all(p.isdigit() and int(p) for p in parts):
        raise ValueError(f"{option}: {text!r}; must be {names}, each at least 1")
    return tuple(map(int, parts))


def parse_names(text: str) -> tuple[str, ...]:
    """The names of "a, B", in lower case, each once."""
    return tuple(dict.fromkeys(p.strip().lower() for p in text.split(",") if p.strip()))

"""The layers of a PackedCache, its file, and the names of its formats."""

from __future__ import annotations

from ... import formats

# The attention function that reads packed rows. Its name is here because attention.py, which
# registers the function, may be half imported where others need the name.
ATTENTION = "metalmm"


def pair_of(format: str) -> tuple[str, str]:
    """The formats of keys and of values that the name of a cache's format stands for.

    "K/V" names both. The name of one packed format is that of the values, beside keys in f16:
    scores are products of keys, and softmax makes a small error of a score a factor. In SmolLM2
    keys in q8_0, too, make six times the error of a question's last logits (docs/guide/fuse.md).
    ValueError: such a name there is not, or of a format that is only read.
    """
    names = format.split("/")
    if len(names) > 2:
        raise ValueError(f"format: {format!r}; must be a format, or two as in 'f16/q8_0'")
    found = []
    for name in names:
        kind = formats.get(name)
        if not kind.packs:
            raise ValueError(f"format: {kind.refusal()}")
        found.append(kind.name)
    if len(found) == 1 and found[0] not in formats.DTYPES:
        found.insert(0, "f16")
    return found[0], found[-1]


def name_of(pair: tuple[str, str]) -> str:
    """The name of the formats of keys and of values: "f16", "f16/q8_0"."""
    return pair[0] if pair[0] == pair[1] and pair[0] in formats.DTYPES else "/".join(pair)

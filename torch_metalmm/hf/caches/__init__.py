"""The layers of a PackedCache, its file, and the names of its formats."""

from __future__ import annotations

from ... import formats

# The attention function that reads packed entries. Its name is here because attention.py, which
# registers the function, may be half imported where others need the name.
ATTENTION = "metalmm"


# The end of a format's name if its entries are those of torch.ops.metalmm.hadamard(values).
_ROTATED = "_rotated"


def format_of(name: str) -> tuple[formats.Format, bool]:
    """The format of a cache's entries, and whether they are of rotated values ("q4_0_rotated").

    ValueError: such a format there is not, it is only read, or is rotated without blocks of 32.
    """
    name = name.lower()
    kind = formats.get(name.removesuffix(_ROTATED))
    is_rotated = name.endswith(_ROTATED)
    if not kind.packs:
        raise ValueError(f"format: {kind.refusal()}")
    if is_rotated and kind.block_values % 32:
        raise ValueError(f"format: {name!r}; only values in blocks of 32 are rotated")
    return kind, is_rotated


def pair_of(format: str) -> tuple[str, str]:
    """The formats of keys and of values that the name of a cache's format stands for.

    "K/V" names both, each of which may be rotated: "q8_0/q4_0_rotated". The name of one packed
    format is that of the values, beside keys in f16: scores are products of keys, and softmax makes
    a small error of a score a factor. In SmolLM2 keys in q8_0, too, make six times the error of a
    question's last logits (docs/guide/fuse.md).
    ValueError: such a name there is not, or of a format that is only read.
    """
    names = format.split("/")
    if len(names) > 2:
        raise ValueError(f"format: {format!r}; must be a format, or two as in 'f16/q8_0'")
    found = []
    for name in names:
        kind, is_rotated = format_of(name)
        found.append(kind.name + _ROTATED * is_rotated)
    if len(found) == 1 and found[0] not in formats.DTYPES:
        found.insert(0, "f16")
    return found[0], found[-1]


def name_of(pair: tuple[str, str]) -> str:
    """The name of the formats of keys and of values: "f16", "f16/q8_0"."""
    return pair[0] if pair[0] == pair[1] and pair[0] in formats.DTYPES else "/".join(pair)

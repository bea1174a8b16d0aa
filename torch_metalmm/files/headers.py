"""The tensors of safetensors files, as the files' headers list them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """A tensor of a file: its safetensors dtype ("U8", "BF16"), shape and name there."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    converted: bool = False  # transformers makes the model's tensor of this one, perhaps of others


def read_headers(files: Sequence[str]) -> dict[str, Found]:
    """{name in the file: tensor}; reads no tensor data.

    ValueError: a file is not a whole safetensors file, or two have a tensor of one name.
    """
    found: dict[str, Found] = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118  # `opened` is no dict
                tensor = opened.get_slice(key)
                shape = tuple(tensor.get_shape())
                if key in found:
                    raise ValueError(f"{key} is in {found[key].file} and in {file}")
                found[key] = Found(str(file), tensor.get_dtype(), shape, key)
    return found


def count_tensors(files: Sequence[str]) -> int:
    """The number of tensors in the files. ValueError: one is not a whole safetensors file."""
    count = 0
    for file in files:
        with _opened(file) as opened:
            count += len(opened.keys())
    return count


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"cannot read {file}: {error}") from None

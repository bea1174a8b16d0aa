"""Code that LoRA's layers and the checks of PEFT's other methods share; either may come first."""

from __future__ import annotations

from typing import Any


class MergesPacked:
    """A base of the layers of PEFT that decode the packed weight which they merge into."""


def describe(module: Any) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"

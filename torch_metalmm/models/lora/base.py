"""What the layers of LoRA and the checks of PEFT's other methods share."""

from __future__ import annotations

from typing import Any

from ...nn import QuantEmbedding, QuantLinear


class MergesPacked:
    """A base of the layers of PEFT that decode the packed weight which they merge into."""


def is_packed(module: Any) -> bool:
    return isinstance(module, QuantLinear | QuantEmbedding)


def describe(module: Any) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"

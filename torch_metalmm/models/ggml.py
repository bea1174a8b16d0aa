"""The numbers by which GGUF files and other libraries name ggml's types."""

from __future__ import annotations


def type_names() -> dict[int, str]:
    """ggml's type ids and their names, lower case."""
    from gguf import GGMLQuantizationType

    return {int(kind): kind.name.lower() for kind in GGMLQuantizationType}

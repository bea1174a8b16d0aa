"""The numbers by which GGUF files and other libraries name ggml's types."""

from __future__ import annotations


def type_names() -> dict[int, str]:
    """ggml's type ids and their names, lower case."""
    from gguf import GGMLQuantizationType

    # Files had q2_0, of June 2026, before the gguf package did.
    return {42: "q2_0"} | {int(kind): kind.name.lower() for kind in GGMLQuantizationType}

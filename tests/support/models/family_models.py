"""The random models of bench/models/families.py, made once for all tests that read them."""

from __future__ import annotations

import functools
from typing import Any

from layer_models import SHARED

from bench.models.families import FAMILIES, family, fused_family

# {case: (family, options)}; keys that layers share, values that are keys before their norm,
# embeddings for each layer, and gates of which all but the largest are cut off.
CASES: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in FAMILIES} | {
    "gemma4_text shared": ("gemma4_text", SHARED),
    "gemma4_text v is k": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "gemma3n_text shared": (
        "gemma3n_text",
        SHARED | {"activation_sparsity_pattern": [0.9, 0.0] * 2},
    ),
}


@functools.cache
def family_pair(case: str) -> tuple[Any, Any]:
    """The packed model, and fused with a cache of q8_0. What a test changes it does to copies."""
    kind, options = CASES[case]
    model = family(kind, **options)
    return model, fused_family(model)

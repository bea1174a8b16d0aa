"""Processors of tensors in the form of transformers' own, for models that it has none for."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from .latent import joined

_KEYS, _VALUES, _BOTH = ".attn_k_b.", ".attn_v_b.", ".attn_kv_b."


class LatentProcessor(TensorProcessor):
    """Joins the two stacks of a latent's keys and values; one waits for the other."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if _KEYS not in name and _VALUES not in name:
            return GGUFTensor(weights, name, {})
        both = name.replace(_KEYS, _BOTH).replace(_VALUES, _BOTH)
        waiting: dict[str, Any] = kwargs["parsed_parameters"]["tensors"]
        target = kwargs["tensor_key_mapping"][both]
        other = waiting.pop(target, None)
        if other is None:
            waiting[target] = weights
            return GGUFTensor(weights, None, {})  # type: ignore[arg-type]  # as theirs
        pair = (weights, other) if _KEYS in name else (other, weights)
        return GGUFTensor(joined(*pair), both, {})


class CorrectedProcessor(TensorProcessor):
    """A correction of scores that is one row of a matrix in the model, and a vector in the file."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        return GGUFTensor(weights.reshape(1, -1) if "exp_probs_b" in name else weights, name, {})

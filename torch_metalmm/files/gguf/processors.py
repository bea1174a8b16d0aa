"""Processors of tensors in the form of transformers' own, for models that it has none for."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import (
    GGUFTensor,
    LlamaTensorProcessor,
    Qwen2MoeTensorProcessor,
    TensorProcessor,
)

from .latent import joined
from .layout import negated_exp

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


class GateProcessor(Qwen2MoeTensorProcessor):
    """A shared expert's gate, which files have as a vector or as a matrix of one row."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if "ffn_gate_inp_shexp" in name:
            return GGUFTensor(weights.reshape(1, -1), name, {})
        return super().process(weights, name, **kwargs)


class HalvesProcessor(TensorProcessor):
    """Rows of q and k that a rotation turns: files have its halves, the model its pairs."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if ".attn_q." in name or ".attn_k." in name:
            turned = self.config["rope_parameters"].get("partial_rotary_factor", 1.0)
            size, rest = self.config["head_dim"], weights.shape[1:]
            heads = weights.reshape(-1, size, *rest)
            half = int(size * turned) // 2
            pairs = np.stack([heads[:, :half], heads[:, half : 2 * half]], 2)
            pairs = pairs.reshape(-1, 2 * half, *rest)
            weights = np.concatenate([pairs, heads[:, 2 * half :]], 1).reshape(weights.shape)
        return GGUFTensor(weights, name, {})


class FalconProcessor(TensorProcessor):
    """Rows of queries, keys and values by group of heads, which files have one kind at a time."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if "attn_qkv" in name:
            groups = self.config["num_key_value_heads"]
            size = weights.shape[0] // (self.config["num_attention_heads"] + 2 * groups)
            ends = [weights.shape[0] - 2 * groups * size, weights.shape[0] - groups * size]
            weights = _by_group(weights, groups, ends)
        return GGUFTensor(weights, name, {})


class KindsProcessor(GateProcessor):
    """Qwen3-Next. Rows of queries, keys, values and gates by head of keys, which files have one
    kind at a time; norms are sums with 1 in the file, but that of a linear layer; A is
    -exp(A_log)."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if ".attn_qkv." in name:
            heads = self.config["linear_num_key_heads"]
            keys = heads * self.config["linear_key_head_dim"]
            values = (len(weights) - 2 * keys) // 2
            weights = _by_group(weights, heads, [keys, 2 * keys, 2 * keys + values])
        elif name.endswith("norm.weight") and ".ssm_norm." not in name:
            weights = weights - 1
        elif name.endswith(".ssm_a"):
            weights = np.log(-weights)
        elif ".ssm_conv1d." in name:
            weights = np.expand_dims(weights, 1)
        return super().process(weights, name, **kwargs)

    def restored(self, value: np.ndarray, name: str) -> np.ndarray | None:
        """The A_log of an ssm_a, None for other vectors. ValueError: as HybridProcessor."""
        return negated_exp(value, name) if name.endswith(".ssm_a") else None


def _by_group(weights: np.ndarray, groups: int, ends: list[int]) -> np.ndarray:
    """Rows of several kinds, which end there, by group; each has as many of a kind."""
    parts = [part.reshape(groups, -1, *weights.shape[1:]) for part in np.split(weights, ends)]
    return np.concatenate(parts, 1).reshape(weights.shape)


class HybridProcessor(TensorProcessor):
    """Layers of Mamba 2: a number for each head is a column in the file, A is -exp(A_log)."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if name.endswith((".ssm_a", ".ssm_d")):
            weights = weights.reshape(-1)
            return GGUFTensor(np.log(-weights) if name.endswith("a") else weights, name, {})
        if ".ssm_norm." in name:
            return GGUFTensor(weights.reshape(-1), name, {})
        if ".ssm_conv1d.weight" in name:
            return GGUFTensor(np.expand_dims(weights, 1), name, {})
        return super().process(weights, name, **kwargs)  # type: ignore[no-untyped-call]

    def restored(self, value: np.ndarray, name: str) -> np.ndarray | None:
        """The vector from which process() makes `value`; None: it makes `value` from itself.

        ValueError: an ssm_a whose exponential is not finite, or 0.
        """
        if name.endswith(".ssm_d"):
            return value.reshape(-1, 1)
        if ".ssm_norm." in name:
            return value.reshape(self.config["mamba_n_groups"], -1)
        if not name.endswith(".ssm_a"):
            return None
        return negated_exp(value, name).reshape(-1, 1)


class GraniteHybridProcessor(HybridProcessor):
    """HybridProcessor with interleaved rows of q and k."""

    def process(self, weights: np.ndarray, name: str, **kwargs: Any) -> Any:
        if ".attn_q." in name or ".attn_k." in name:
            paired: Any = LlamaTensorProcessor
            return paired(self.config).process(weights, name, **kwargs)
        return super().process(weights, name, **kwargs)

"""Attention whose heads share a latent of keys and values, as DeepSeek's: its sizes in a file.

The file has the matrix that makes keys and values of the latent in one of two layouts. Older ones
have it as transformers does, attn_kv_b [heads (nope + v), rank]. Newer ones have two stacks, each
a matrix per head: attn_v_b [heads, v, rank], and keys turned, attn_k_b [heads, rank, nope], so that
a query is multiplied instead of the latent. Blocks of the turned one run along another axis than
those of the model's matrix, which is decoded then.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .file import GgufFile

_RANK, _QUERY_RANK = "attention.kv_lora_rank", "attention.q_lora_rank"
_HEADS, _ROTATED = "attention.head_count", "rope.dimension_count"
_KEY, _VALUE = "attention.key_length", "attention.value_length"
_LOG = "rope.scaling.yarn_log_multiplier"
_LOG_UNIT = 0.1  # the unit of _LOG, in files of these architectures alone
_UNSAID = "without a number other than 0 llama.cpp scales scores otherwise than transformers"


def latent_config(file: GgufFile, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of such a file's config beside those of its row.

    ValueError: a size is missing, or is none; a rotation by yarn does not say its scale.
    """
    # With a latent as the one key head, its sizes are those of *_length, and a head's are *_mla.
    end = "_mla" if f"{prefix}{_KEY}_mla" in file.metadata else ""
    keys = (_RANK, _HEADS, _ROTATED, _KEY + end, _VALUE + end)
    rank, heads, rotated, key_length, value_length = (
        file.integer(key, file.metadata.get(key), 1) for key in (prefix + k for k in keys)
    )
    if key_length <= rotated:
        raise ValueError(
            f"{file.path}: {prefix + keys[3]} is {key_length}; it must be more than "
            f"{prefix + _ROTATED}, {rotated}"
        )
    rope = values["rope_parameters"]
    rope.pop("partial_rotary_factor", None)  # the model rotates all of the part that it rotates
    if not _says_scale(rope):
        raise ValueError(
            f"{file.path}: {prefix + _LOG} is {rope.get('mscale_all_dim')!r}, and "
            f"{prefix}rope.scaling.type is 'yarn'; {_UNSAID}"
        )
    if "mscale_all_dim" in rope:
        scale = round(rope["mscale_all_dim"] / _LOG_UNIT, 6)  # f32 has 7 digits
        rope |= {"mscale_all_dim": scale, "mscale": scale}
    return {
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": file.metadata.get(prefix + _QUERY_RANK) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        "head_dim": rotated,
    }


def latent_metadata(config: Any) -> dict[str, Any]:
    """The values of such a model, by their keys, in the layout of one matrix.

    ValueError: its rotation by yarn does not say its scale.
    """
    rope = config.rope_parameters
    if not _says_scale(rope):
        raise ValueError(
            f"model: its config has rope_parameters with rope_type = 'yarn' and mscale_all_dim = "
            f"{rope.get('mscale_all_dim')!r}; {_UNSAID}"
        )
    values = {
        _RANK: config.kv_lora_rank,
        # llama.cpp lets the key be missing in models of some numbers of layers only.
        _QUERY_RANK: config.q_lora_rank or 0,
        _ROTATED: config.qk_rope_head_dim,
        _KEY: config.qk_nope_head_dim + config.qk_rope_head_dim,
        _VALUE: config.v_head_dim,
    }
    log = rope.get("mscale_all_dim")
    return values if log is None else values | {_LOG: log * _LOG_UNIT}


def _says_scale(rope: dict[str, Any]) -> bool:
    """Whether readers agree on the scale of such a rotation.

    Without mscale_all_dim transformers scales cosines and sines by m = 0.1 ln(factor) + 1, so that
    only the rotated part of a score has m^2. llama.cpp multiplies the score by m^2 once more: its
    logits equal transformers' with mscale_all_dim = 1 and attention_factor = m.
    """
    return rope.get("rope_type") != "yarn" or bool(rope.get("mscale_all_dim"))


def joined(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """attn_kv_b [heads (nope + v), rank] of attn_k_b [heads, rank, nope] and attn_v_b."""
    both = np.concatenate((keys.swapaxes(1, 2), values), 1)
    return both.reshape(-1, both.shape[-1])

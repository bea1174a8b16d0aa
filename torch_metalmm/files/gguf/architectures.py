"""The config of a GGUF file, and the metadata of a model, by the rows of rows.py."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from .file import GgufFile
from .latent import latent_config, latent_metadata
from .routing import check_routing
from .rows import (
    GRANITE,
    SIZES,
    STORED_AS,
    WINDOW,
    Architecture,
    all_rows,
    row_of,
)

_KV_HEADS, _KEY_LENGTH = "attention.head_count_kv", "attention.key_length"
_EXPERTS = "expert_count"
# Parts of a rotation's scaling, under rope.scaling., and in rope_parameters.
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Keys that readers want as FLOAT32, whatever numbers a config has; all others are UINT32.
_FLOATS = re.compile(
    r"attention\.(scale|clamp_kqv|temperature_scale|layer_norm_(rms_)?epsilon)|.*_(scale|softcapping)"
    r"|rope\.freq_base|rope\.scaling\.(factor|yarn_.*)"
)
# Values that make another model of what a row describes.
_SHARED = ("expert_shared_feed_forward_length", "expert_shared_count")
_OTHERS = (_EXPERTS, *_SHARED, *WINDOW)
# Values without which a model would silently have its class's default.
_NEEDED = (
    *(*SIZES, *GRANITE, "attention.layer_norm_rms_epsilon", *WINDOW, "logit_scale"),
    *(_EXPERTS, "expert_used_count"),
)
_BOOLS = ("expert_weights_norm",)


def config_values(file: GgufFile) -> dict[str, Any]:
    """The config of a file whose architecture has a row.

    ValueError: a value is missing, or is one of a model that no row describes.
    """
    row, prefix = row_of(file.architecture, file.metadata), f"{file.architecture}."
    assert row is not None
    known = {*row.keys, *row.states, *row.computed}
    for key in _OTHERS:
        if key not in known and file.metadata.get(prefix + key):
            raise ValueError(f"{file.path}: {prefix + key} is known for other architectures only")
    values: dict[str, Any] = {
        "model_type": row.model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rotation(file, prefix),
    }
    for path, constant in row.has.items():
        if "truncate" not in path or values["rope_parameters"]["rope_type"] == "yarn":
            _put(values, path, constant)
    for key, name in {**row.keys, _KV_HEADS: "num_key_value_heads"}.items():
        value = file.metadata.get(prefix + key)
        if value is None and (key in _NEEDED or prefix + key in file.arrays):
            raise ValueError(f"{file.path}: {prefix + key} is missing, or a list")
        if value is not None:
            _put(values, name, value)
    check_routing(file, prefix, row.keys, row.states, values)
    for key, number in row.states.items():
        if file.metadata.get(prefix + key, number) != number:
            given = file.metadata[prefix + key]
            raise ValueError(f"{file.path}: {prefix + key} is {given!r}; it must be {number}")
    values["num_hidden_layers"] -= _predicting(file, prefix)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values["head_dim"] = _head_dim(file, prefix)
    values |= {name: tensor in file.tensors for name, tensor in row.flags.items()}
    if row.latent:
        values |= latent_config(file, prefix, values)
    values |= {name: of(values) for name, of in row.derived.items()}
    for name, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding")):
        values[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return values


def _predicting(file: GgufFile, prefix: str) -> int:
    """How many layers predict tokens beyond the next, which transformers' models do not have."""
    key, blocks = f"{prefix}nextn_predict_layers", file.metadata[f"{prefix}block_count"]
    count = file.metadata.get(key, 0)
    if type(count) is not int or not 0 <= count < blocks:
        raise ValueError(
            f"{file.path}: {key} = {count!r}; allowed: integers from 0 to {blocks - 1}, one less "
            "than block_count"
        )
    return count


def metadata(config: Any) -> tuple[str, Architecture, dict[str, Any]]:
    """(architecture, its row, its values by their full keys) of a transformers config.

    ValueError: no row is of its model type, or no key says its rotation, its mask or the scale of
    its scores, or a value is not of its key's type.
    """
    kind = config.model_type
    rows = all_rows()
    wanted = next((r.model_type for a, r in rows if a == STORED_AS.get(kind)), kind)
    found = [(name, row) for name, row in rows if row.writes and row.model_type == wanted]
    if not found:
        known = sorted(row.model_type for _, row in rows if row.writes)
        raise ValueError(
            f"model: GGUF files of {config.model_type} models are not written; those of "
            f"{', '.join(known)} are"
        )
    ((architecture, row),) = found
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scale = getattr(config, "query_pre_attn_scalar", head)
    if scale != head:  # llama.cpp has 1 / sqrt(head_dim) for Gemma, but in the models of 27 B
        raise ValueError(f"model: no key of GGUF says query_pre_attn_scalar = {scale}, not {head}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError("model: no key of GGUF says use_bidirectional_attention")
    values = {"vocab_size": config.vocab_size, _KEY_LENGTH: head, "attention.value_length": head}
    values[_KV_HEADS] = config.num_key_value_heads
    for key, name in row.keys.items():
        values[key] = _get(config, name)
    values |= row.states
    values |= {key: of(config) for key, of in row.computed.items()}
    if architecture == "olmo":
        values["attention.layer_norm_epsilon"] = (
            1e-5  # its norms have no weights, and this is theirs
        )
    values |= _rotation_values(config, head)
    if row.latent:
        values |= latent_metadata(config)
    return (
        architecture,
        row,
        {
            f"{architecture}.{key}": _typed(key, value)
            for key, value in values.items()
            if value is not None
        },
    )


def _typed(key: str, value: Any) -> float | int | str | bool:
    """The value as Python's counterpart of its key's type. ValueError: it cannot be one."""
    if isinstance(value, str):  # rope.scaling.type
        return value
    if key in _BOOLS and isinstance(value, bool):
        return value
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise ValueError(f"model: GGUF's {key} is a number, and its config has {value!r}")
    if _FLOATS.fullmatch(key):
        return float(value)
    if not (float(value).is_integer() and 0 <= value < 1 << 32):
        raise ValueError(f"model: GGUF's {key} is UINT32, and its config has {value!r}")
    return int(value)


def llama3_divisors(config: Any, architecture: str) -> Tensor | None:
    """What Llama 3's scaling divides each frequency of the rotation by; None without it.

    ValueError: llama.cpp does not read them in files of the architecture.
    """
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS

    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    if MODEL_TENSOR.ROPE_FREQS not in MODEL_TENSORS[arch]:
        raise ValueError(
            f"model: GGUF files of {architecture} models have no tensor for rope_type = 'llama3'"
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return divisors(head // 2, rope)


def divisors(count: int, rope: dict[str, Any]) -> Tensor:
    """The divisors of `count` frequencies, float64, by rope_parameters of the type llama3."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    steps = torch.arange(count, dtype=torch.float64) / count
    context = rope["original_max_position_embeddings"]
    turns = context / (2 * torch.pi * float(rope["rope_theta"]) ** steps)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    found: Tensor = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return found


def _head_dim(file: GgufFile, prefix: str) -> int:
    """attention.key_length, or what the heads have of the width."""
    given = file.metadata.get(prefix + _KEY_LENGTH)
    if given is None:
        given = file.metadata[prefix + "embedding_length"]
        given //= file.metadata[prefix + "attention.head_count"]
    return int(given)


def _rotation(file: GgufFile, prefix: str) -> dict[str, Any]:
    """rope_parameters. The defaults are those of llama.cpp."""
    rope = {"rope_theta": file.metadata.get(prefix + "rope.freq_base", 10000.0)}
    turned = file.metadata.get(prefix + "rope.dimension_count")
    if turned is not None and f"{prefix}attention.head_count" in file.metadata:
        rope["partial_rotary_factor"] = turned / _head_dim(file, prefix)
    for key, name in _SCALING.items():
        value = file.metadata.get(f"{prefix}rope.scaling.{key}")
        if value is not None:
            rope[name] = "default" if value == "none" else value
    log = file.metadata.get(f"{prefix}rope.scaling.yarn_log_multiplier")
    if log is not None:
        # llama.cpp scales by mscale 1 over that of this key, so other values of mscale are refused
        rope["mscale_all_dim"], rope["mscale"] = log, 1.0
    return {"rope_type": "default"} | rope


def _rotation_values(config: Any, head: int) -> dict[str, Any]:
    """The keys of the config's rotation. ValueError: it has no name in GGUF."""
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)  # llama.cpp knows Gemma 3's other one by itself
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(f"model: no key of GGUF says rope_type = {kind!r}")
    turned = int(head * rope.get("partial_rotary_factor", 1.0))
    values = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": turned}
    if kind in ("linear", "yarn"):  # Llama 3's is a tensor
        for key, name in _SCALING.items():
            values[f"rope.scaling.{key}"] = rope.get(name)
        values["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim")
    return values


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        values = values[name]
    values[last] = value


def _get(config: Any, path: str) -> Any:
    first, *rest = path.split(".")
    value: Any = getattr(config, first, None)
    for name in rest:
        value = value.get(name)
    return value

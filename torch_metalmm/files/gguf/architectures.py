"""The config of a GGUF file, and the metadata of a model, by the rows of rows.py."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import derive
from .derive import ROPE_DIVISORS
from .file import GgufFile
from .latent import latent_config, latent_metadata
from .map import arch_of
from .routing import check_routing
from .rows import (
    ARCHITECTURES,
    BIASES,
    GRANITE,
    LAYER,
    RMS,
    SIZES,
    STORED_AS,
    WINDOW,
    Architecture,
    all_rows,
    is_of,
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
    *(*SIZES, *GRANITE, RMS, LAYER, *WINDOW, "logit_scale"),
    *(_EXPERTS, "expert_used_count"),
)
_BOOLS = ("expert_weights_norm", "rope.scaling.finetuned", "attention.recurrent_layers")
_LISTS = (_KV_HEADS, "attention.recurrent_layers", "rope.dimension_sections")


def model_config(file: GgufFile) -> tuple[Any, Architecture, dict[str, Any]]:
    """The transformers config of the file, its row, and the values that the config is made of.

    ValueError that lists the supported architectures if the file's is not one of them; a value is
    missing, or is one of a model that no row describes.
    """
    from transformers import CONFIG_MAPPING

    row = row_of(file.architecture, file.metadata | file.arrays)
    if row is None:
        raise ValueError(
            f"{file.path}: no model is known for the GGUF architecture {file.architecture!r}; "
            f"supported: {', '.join(supported_architectures())}"
        )
    values = config_values(file, row)
    if row.model_type == "t5" and "enc.blk.1.attn_rel_b.weight" in file.tensors:  # in each layer
        values["model_type"] = "umt5"
        values["tie_word_embeddings"] = False  # as UMT5's own checkpoints say: the head is unscaled
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    _add_rope_scaling(file, values)
    kind = CONFIG_MAPPING[values["model_type"]]
    fixed = [n for n in values if getattr(getattr(kind, n, 0), "fset", 0) is None]  # properties
    made = {name: value for name, value in values.items() if name not in fixed}
    return kind.from_dict(made), row, values


def supported_architectures() -> list[str]:
    """The values of general.architecture that can be loaded, sorted."""
    return sorted(ARCHITECTURES)


def config_values(file: GgufFile, row: Architecture) -> dict[str, Any]:
    """The config of the file by its row. ValueError as of model_config."""
    refuse_spoiled(file.path, row, file.tensors)
    prefix = f"{file.architecture}."
    known = {*row.keys, *row.states, *row.computed}
    for key in _OTHERS:
        if key not in known and file.metadata.get(prefix + key):
            raise ValueError(f"{file.path}: {prefix + key} is known for other architectures only")
    values: dict[str, Any] = {
        "model_type": row.model_type,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding")):
        values[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if "attention.head_count" in row.keys:
        _heads(file)
    if row.rotates:
        values["rope_parameters"] = _rotation(file, prefix)
    for path, constant in row.has.items():
        if "truncate" not in path or values["rope_parameters"]["rope_type"] == "yarn":
            _put(values, path, copy.deepcopy(constant))
    for key, name in row.keys.items():
        _read(file, row, prefix + key, name, values)
    if "num_hidden_layers" in values:
        values["num_hidden_layers"] -= _predicting(file, prefix)
    if "attention.head_count" in row.keys:
        heads = _heads(file)
        kv_heads = file.stated(_KV_HEADS)
        if isinstance(kv_heads, list) and "num_key_value_heads" not in row.derived:
            raise ValueError(f"{file.path}: {prefix}{_KV_HEADS} is missing, or a list")
        values["num_key_value_heads"] = heads if kv_heads is None else kv_heads
        values["head_dim"] = derive.head_dim(values, file)
    check_routing(file, prefix, row.keys, row.states, values)
    for key, number in row.states.items():
        if file.metadata.get(prefix + key, number) != number:
            given = file.metadata[prefix + key]
            raise ValueError(f"{file.path}: {prefix + key} is {given!r}; it must be {number}")
    values |= _flags(file, row)
    if row.latent:
        values |= latent_config(file, prefix, values)
    for name, rule in row.derived.items():
        values[name] = rule(values, file)
    return values


def refuse_spoiled(where: object, row: Architecture, names: Iterable[str]) -> None:
    """ValueError: `where` has a tensor that the row names as spoiled."""
    found = next((n for n in names if re.fullmatch(rf"blk\.\d+\.{row.spoiled}", n)), None)
    if found is not None:
        raise ValueError(
            f"{where}: {found}: llama.cpp's converter writes another bias than the model's into "
            f"files of {row.model_type}; allowed: models without it"
        )


def _flags(file: GgufFile, row: Architecture) -> dict[str, bool]:
    """The row's flags, and those of BIASES that the config has."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[row.model_type]
    flags = {name: end for name, end in BIASES.items() if hasattr(kind, name)} | {**row.flags}
    ends = {name.split(".", 2)[-1] for name in file.tensors if name.startswith("blk.")}
    return {n: any(re.fullmatch(end, given) for given in ends) for n, end in flags.items()}


def _read(file: GgufFile, row: Architecture, key: str, name: str, values: dict[str, Any]) -> None:
    """Read the key's number into the values. ValueError: it is missing and needed, or a list."""
    value, short = file.metadata.get(key), key.partition(".")[2]
    either = {RMS, LAYER} <= row.keys.keys() and short in (RMS, LAYER)
    needed = short in _NEEDED and name not in row.has and name not in row.derived and not either
    if value is None and (needed or key in file.arrays):
        raise ValueError(f"{file.path}: {key} is missing, or a list")
    if value is not None:
        none = name == "sliding_window" and value == 0
        _put(values, name, None if none else value)


def _heads(file: GgufFile) -> int:
    key, width = f"{file.architecture}.attention.head_count", file.stated("embedding_length")
    return file.integer(key, file.value(key), 1, width if type(width) is int else None)


def _predicting(file: GgufFile, prefix: str) -> int:
    """The number of layers that predict later tokens, which transformers' models do not have."""
    key, blocks = f"{prefix}nextn_predict_layers", file.metadata[f"{prefix}block_count"]
    return file.integer(key, file.metadata.get(key, 0), 0, blocks - 1)


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
    architecture, row = next(pair for pair in found if len(found) == 1 or is_of(*pair, config))
    config = row.as_stated(config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scalar = derive.attention_scalar(
        architecture, config.num_hidden_layers, config.hidden_size, config.num_attention_heads, head
    )
    scale = getattr(config, "query_pre_attn_scalar", scalar)
    if scale != scalar:
        raise ValueError(
            f"model: no key of GGUF says query_pre_attn_scalar = {scale}, not {scalar}"
        )
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
            1e-5  # the eps of OLMo's norms, which have no weights
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


def _typed(key: str, value: Any) -> float | int | str | bool | list[Any]:
    """The value as Python's counterpart of its key's type. ValueError: it cannot be one."""
    if isinstance(value, list) and key in _LISTS:
        return [_typed(key, each) for each in value]
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
    """The divisors of the rotation's frequencies by Llama 3's scaling; None without such scaling.

    ValueError: llama.cpp does not read them in files of the architecture.
    """
    from gguf import MODEL_TENSOR, MODEL_TENSORS

    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    if MODEL_TENSOR.ROPE_FREQS not in MODEL_TENSORS[arch_of(architecture)]:
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


def _add_rope_scaling(file: GgufFile, values: dict[str, Any]) -> None:
    """State Llama 3's rope scaling in the config; the file has it as one divisor per frequency."""
    theta = values.get("rope_parameters", {}).get("rope_theta")
    if ROPE_DIVISORS not in file.tensors or theta is None:
        return
    given = file.dense(ROPE_DIVISORS).flatten().double()
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(given.max())}
    rope |= {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    for high in (4.0, 1.0):  # Llama 3.1 to 3.3, and 4; only the overall factor differs
        expected = divisors(given.numel(), rope | {"high_freq_factor": high})
        if rope["factor"] > 1 and torch.allclose(given, expected, rtol=1e-4):
            values["rope_parameters"] = rope | {"high_freq_factor": high}


def _rotation(file: GgufFile, prefix: str) -> dict[str, Any]:
    """rope_parameters. The defaults are those of llama.cpp."""
    rope = {"rope_theta": file.metadata.get(prefix + "rope.freq_base", 10000.0)}
    turned = file.metadata.get(prefix + "rope.dimension_count")
    if turned is not None and file.stated("attention.head_count"):
        rope["partial_rotary_factor"] = turned / derive.head_dim({}, file)
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
    elif kind == "default":  # files of Phi 3 have it without a scaling, too
        original = rope.get("original_max_position_embeddings")
        values["rope.scaling.original_context_length"] = original
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

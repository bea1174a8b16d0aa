"""Random transformers models, and their GGUF files as llama.cpp's converter makes them.

For the architectures that transformers does not read: names of tensors are the gguf package's, and
values and metadata are stated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf_cases import CASES, HEAD, Case, architecture_of
from gguf_files import CONTEXT, FFN, HEADS, MIXED, H, write_gguf
from torch import Tensor

from torch_metalmm.formats import get

LAYERS, KV_HEADS = 4, 2

_CONFIG: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "vocab_size": 320,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FILE: dict[str, Any] = {
    "context_length": CONTEXT,
    "block_count": LAYERS,
    "feed_forward_length": FFN,
    "embedding_length": H,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
}
_EPS = {
    "rms": ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    "layer": ("attention.layer_norm_epsilon", "layer_norm_eps"),
}


def random_hf(case: str, tied: bool = False, seed: int = 0, **others: Any) -> Any:
    """The case's model in f32, with random weights, biases and norms; others: of its config."""
    row = CASES[case]
    values = _CONFIG | row.values | others
    rope = {"rope_type": "default", "rope_theta": row.theta}
    if row.turned != HEAD:
        rope["partial_rotary_factor"] = row.turned / HEAD
    values["rope_parameters"] = others.get("rope_parameters", rope | row.rope)
    kind = getattr(transformers, row.config + "Config")
    config = kind(**values, tie_word_embeddings=tied)
    config._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            value.copy_(torch.randn(value.shape) * 0.05)
            if "norm" in name and name.endswith("weight") and not row.plus_one:
                value.add_(1)
    return model


def convert(model: Any, case: str, path: Path, kinds: tuple[str, ...] = MIXED) -> Path:
    """The model's file, matrices in `kinds` in turn; the model gets the weights of the file."""
    row, kind = (
        CASES[case],
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture_of(case)),
    )
    names = gguf.get_tensor_name_map(kind, LAYERS)
    formats = cycle(kinds)
    tensors = {}
    text = model.config.get_text_config()
    tied = model.config.tie_word_embeddings
    for name, value in model.state_dict().items():
        base, _, leaf = name.rpartition(".")
        if tied and name == "lm_head.weight":
            continue
        if ".experts." in name:
            tensors |= _experts(row, name, value, formats)
            continue
        if row.stacks and name.endswith("kv_b_proj.weight"):
            tensors |= _stacks(text, f"blk.{name.split('.')[2]}", value, formats)
            continue
        found = names.get_name(base)
        alias = next((a for end, a in row.aliases.items() if name.endswith(end)), None)
        if alias is not None:
            found, _, leaf = f"blk.{name.split('.')[2]}.{alias}".rpartition(".")
        elif found is None:  # a parameter without a kind
            found, leaf = names.get_name(name), "weight"
        assert found is not None, name
        tensors[f"{found}.{leaf}"] = _stored(row, found, value, formats)
    if row.rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _divisors(row), "f32"
    key, attribute = _EPS[row.eps]
    stated = _FILE | {
        key: float(getattr(text, attribute, 1e-5)),  # Olmo's config has none
        "rope.freq_base": row.theta,
        "rope.dimension_count": row.turned,
        "vocab_size": 320,
    }
    return write_gguf(path, architecture_of(case), tensors, stated | row.file)


def _stored(row: Case, name: str, value: Tensor, formats: Iterator[str]) -> tuple[np.ndarray, str]:
    """What the file has for the tensor; the tensor becomes what that decodes to."""
    if name.endswith("norm"):
        made = value.numpy() + np.float32(row.plus_one)
        value.copy_(torch.from_numpy(made - np.float32(row.plus_one)))
        return made, "f32"
    if name.endswith("ffn_gate_inp"):
        return value.numpy().copy(), "f32"
    if name.endswith(("ffn_gate_inp_shexp", "exp_probs_b")) and value.dim() == 2:
        return value[0].numpy().copy(), "f32"
    if value.dim() == 1:
        return _paired(row, name, value.numpy().copy()), "f32"
    data, format, decoded = _rounded(value, next(formats))
    value.copy_(decoded)
    return _of_numpy(_paired(row, name, data), format), format


def _rounded(value: Tensor, format: str) -> tuple[np.ndarray, str, Tensor]:
    """(packed bytes, their format, what the gguf package decodes them to) of [..., K]."""
    rows = value.reshape(-1, value.shape[-1])
    data = torch.ops.metalmm.quantize(rows, format).numpy()
    decoded = gguf.dequantize(data, gguf.GGMLQuantizationType[format.upper()])
    made = torch.from_numpy(np.ascontiguousarray(decoded, np.float32)).view(value.shape)
    return data.reshape(*value.shape[:-1], -1), format, made


def _of_numpy(data: np.ndarray, format: str) -> np.ndarray:
    plain = {"f32": np.float32, "f16": np.float16}.get(format)
    return data if plain is None else np.ascontiguousarray(data).view(plain)


def _experts(
    row: Case, name: str, value: Tensor, formats: Iterator[str]
) -> dict[str, tuple[np.ndarray, str]]:
    """What the file has for a tensor of experts, which becomes what that decodes to.

    gate and up have one format in layers of even number, as most files, and two in others.
    """
    layer, leaf = int(name.split(".")[2]), name.rpartition(".")[2]
    kind = "bias" if leaf.endswith("_bias") else "weight"
    turned = kind == "weight" and (row.alternating or row.columns)
    stored = value.transpose(1, 2) if turned else value
    if leaf.startswith("gate_up"):
        n = stored.shape[1] // 2
        pair = (stored[:, ::2], stored[:, 1::2]) if row.alternating else stored.split(n, 1)
        parts = {"ffn_gate_exps": pair[0], "ffn_up_exps": pair[1]}
    else:
        parts = {"ffn_down_exps": stored}
    tensors, format = {}, next(formats)
    for leaf, part in parts.items():
        if kind == "bias":
            tensors[f"blk.{layer}.{leaf}.bias"] = part.numpy().copy(), "f32"
            continue
        data, _, decoded = _rounded(part, format)
        part.copy_(decoded)
        tensors[f"blk.{layer}.{leaf}.weight"] = _of_numpy(data, format), format
        format = next(formats) if layer % 2 else format
    return tensors


def _stacks(
    text: Any, block: str, value: Tensor, formats: Iterator[str]
) -> dict[str, tuple[np.ndarray, str]]:
    """What the file has for keys and values of a latent, which become what that decodes to."""
    heads = value.view(text.num_attention_heads, -1, value.shape[1])
    keys, values = heads.split((text.qk_nope_head_dim, text.v_head_dim), 1)
    tensors = {}
    for leaf, part in (("k_b", keys.transpose(1, 2)), ("v_b", values)):
        format = next(f for f in formats if part.shape[-1] % get(f).block_values == 0)
        data, _, decoded = _rounded(part, format)
        part.copy_(decoded)
        tensors[f"{block}.attn_{leaf}.weight"] = _of_numpy(data, format), format
    return tensors


def _divisors(row: Case) -> np.ndarray:
    """Of each frequency, where no wavelength lies between two factors that are equal."""
    waves = 2 * np.pi * row.theta ** (np.arange(HEAD // 2) * 2 / HEAD)
    old = row.rope["original_max_position_embeddings"]
    return np.where(waves < old, 1, row.rope["factor"]).astype(np.float32)


def _paired(row: Case, name: str, rows: np.ndarray) -> np.ndarray:
    """Rows i and i + half of a head side by side, where the architecture has q and k so."""
    if not row.interleaved or not name.endswith(("attn_q", "attn_k")):
        return rows
    heads = HEADS if name.endswith("attn_q") else KV_HEADS
    split = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def fields_of(path: Path) -> dict[str, Any]:
    """The metadata, values by their keys."""
    fields = gguf.GGUFReader(path).fields.items()
    return {key: f.contents() for key, f in fields if not key.startswith("GGUF.")}

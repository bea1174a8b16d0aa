"""Random transformers models, and their GGUF files as llama.cpp's converter makes them.

For the architectures that transformers does not read: names of tensors are the gguf package's, and
values and metadata are stated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf_files import CONTEXT, FFN, HEADS, MIXED, H, write_gguf
from torch import Tensor

from torch_metalmm.formats import get

LAYERS, KV_HEADS, HEAD = 4, 2, H // HEADS

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


@dataclass(frozen=True)
class Case:
    """A model: the class of its config, its own values, and what a file of it has.

    interleaved: the converter turns the halves of each head's q and k into pairs. plus_one: it adds
    1 to the weights of norms. eps: which of the two keys it has. vision: the parts of the rotation
    of a model that sees, whose text is what a file has.
    """

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    turned: int = HEAD
    interleaved: bool = False
    plus_one: bool = False
    eps: str = "rms"
    vision: dict[str, Any] = field(default_factory=dict)


_SCALES = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.125,
}
_VISION = {"patch_size": 14, "depth": 1, "embed_dim": 32, "hidden_size": H, "num_heads": 2}

CASES = {
    "arcee": Case("Arcee", interleaved=True),
    "command-r": Case("Cohere", {"logit_scale": 0.125}, {"logit_scale": 0.125}, eps="layer"),
    "command-r+": Case(
        "Cohere",
        {"logit_scale": 0.125, "use_qk_norm": True},
        {"logit_scale": 0.125},
        eps="layer",
    ),
    "cohere2": Case(
        "Cohere2",
        {"logit_scale": 0.125, "sliding_window": 8},
        {"logit_scale": 0.125, "attention.sliding_window": 8},
        eps="layer",
    ),
    "ernie4_5": Case("Ernie4_5", {"head_dim": HEAD}, {"attention.key_length": HEAD}),
    "gemma": Case("Gemma", {"head_dim": HEAD}, {"attention.key_length": HEAD}, plus_one=True),
    "glm4": Case(
        "Glm4",
        {"head_dim": HEAD, "attention_bias": True, "pad_token_id": 2},
        theta=5e5,
        turned=HEAD // 2,
    ),
    "granite": Case(
        "Granite",
        {**_SCALES, "attention_multiplier": 0.25, "logits_scaling": 8.0},
        {
            "embedding_scale": 2.0,
            "residual_scale": 0.5,
            "attention.scale": 0.25,
            "logit_scale": 8.0,
        },
        interleaved=True,
    ),
    "mistral3": Case(
        "Ministral3",
        {"head_dim": HEAD},
        {
            "attention.key_length": HEAD,
            "attention.temperature_scale": 0.125,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
        interleaved=True,
    ),
    "olmo": Case(
        "Olmo", {"clip_qkv": 2.0}, {"attention.clamp_kqv": 2.0}, interleaved=True, eps="layer"
    ),
    "olmo2": Case("Olmo2", theta=5e5),
    "phi2": Case("Phi", turned=HEAD // 2, eps="layer"),
    "qwen2vl": Case(
        "Qwen2VL",
        {},
        {"rope.dimension_sections": [8, 12, 12, 0]},
        vision={"mrope_section": [8, 12, 12]},
    ),
    "qwen3vl": Case(
        "Qwen3VL",
        {"head_dim": HEAD},
        {"attention.key_length": HEAD, "rope.dimension_sections": [12, 10, 10, 0]},
        vision={"mrope_section": [12, 10, 10], "mrope_interleaved": True},
    ),
    "seed_oss": Case(
        "SeedOss",
        {"head_dim": HEAD, "attention_bias": True},
        {"attention.key_length": HEAD},
    ),
    "smollm3": Case("SmolLM3", {"pad_token_id": 2}, theta=5e6, interleaved=True),
}


def architecture_of(case: str) -> str:
    return case.removesuffix("+")


def random_hf(case: str, tied: bool = False, seed: int = 0) -> Any:
    """The case's model in f32, with random weights, biases and norms."""
    row = CASES[case]
    values = _CONFIG | row.values
    rope = {"rope_type": "default", "rope_theta": row.theta}
    if row.turned != HEAD:
        rope["partial_rotary_factor"] = row.turned / HEAD
    values["rope_parameters"] = (rope | _YARN) if case == "mistral3" else rope
    kind = getattr(transformers, row.config + "Config")
    if row.vision:
        text = values | {"rope_parameters": rope | row.vision}
        config = kind(text_config=text, vision_config=_VISION, tie_word_embeddings=tied)
    else:
        config = kind(**values, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    auto = "AutoModelForImageTextToText" if row.vision else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
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
    tied = model.config.tie_word_embeddings
    for name, value in model.state_dict().items():
        base, _, leaf = name.replace("model.language_model.", "model.").rpartition(".")
        if (tied and name == "lm_head.weight") or ".visual." in name:
            continue
        found = names.get_name(base)
        assert found is not None, name
        tensors[f"{found}.{leaf}"] = _stored(row, found, value, formats)
    key, attribute = _EPS[row.eps]
    text = model.config.get_text_config()
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
    if value.dim() == 1:
        return _paired(row, name, value.numpy().copy()), "f32"
    format = next(formats)
    packed = torch.ops.metalmm.quantize(value, format)
    kind = gguf.GGMLQuantizationType[format.upper()]
    data = packed.numpy()
    decoded = gguf.dequantize(data, kind) if get(format).packs else data
    value.copy_(torch.from_numpy(np.ascontiguousarray(decoded, np.float32)).view(value.shape))
    data = _paired(row, name, data)
    plain = {"f32": np.float32, "f16": np.float16}.get(format)
    return (data if plain is None else np.ascontiguousarray(data).view(plain)), format


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

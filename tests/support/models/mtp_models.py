"""Random models whose checkpoints have a head for the token after the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_files import fields_of, tensors_of, write_gguf
from layer_models import VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.models.families import LINEAR, new_model, sizes

_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_DELTA = LINEAR | {"head_dim": 32}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _EXPERTS,
    "glm4_moe": _ROUTED | {"head_dim": 32, "use_qk_norm": True},
    "deepseek_v3": _ROUTED | _LATENT,
}
_BEHIND = ("glm4_moe", "deepseek_v3")  # whose head lies behind the layers


def _random(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data += drawn / 4 if parameter.dim() == 1 else drawn / 16
    return model.eval()


def trunk(family: str, **options: Any) -> Any:
    """The model, dense, in f32, the same at each call."""
    given = sizes(64, 96, VOCABULARY) | FAMILIES.get(family, {}) | options
    return _random(new_model(family, given), 0)


def folder_with_head(model: Any, folder: Path) -> Path:
    """The checkpoint of the model as its makers publish it, with a head."""
    family, size = model.config.model_type, model.config.hidden_size
    count = model.config.num_hidden_layers
    model.save_pretrained(folder)
    kinds = {"layer_types": ["full_attention"], "first_k_dense_replace": 0}
    given = {n: v for n, v in kinds.items() if n in FAMILIES[family]}
    block = trunk(family, num_hidden_layers=1, **given)
    block = _random(block, 1)
    (folder / "block").mkdir()
    block.save_pretrained(folder / "block")  # by the names of published checkpoints
    tensors = load_file(folder / "model.safetensors")
    behind = family in _BEHIND
    layer = f"model.layers.{count}" if behind else "mtp.layers.0"
    own = {"norm": "norm", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    own |= {"eh_proj": "fc"}
    names = {n: f"mtp.{theirs}" for n, theirs in own.items()}
    if behind:
        names = {n: f"{layer}.{n}" for n in own} | {"norm": f"{layer}.shared_head.norm"}
    for name, value in load_file(folder / "block" / "model.safetensors").items():
        if inside := re.fullmatch(r"model\.layers\.0\.(.+)", name):
            tensors[f"{layer}.{inside[1]}"] = value
    tensors[f"{names['norm']}.weight"] = block.model.norm.weight.data
    generator = torch.Generator().manual_seed(2)
    for name in ("enorm", "hnorm"):
        tensors[f"{names[name]}.weight"] = torch.randn(size, generator=generator) / 4 + behind
    drawn = torch.randn(size, 2 * size, generator=generator) / 8
    tensors[f"{names['eh_proj']}.weight"] = drawn
    if behind:
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def step(head: Any, tokens: Tensor, hidden: Tensor, cache: Any, positions: Tensor) -> Any:
    """(the logits behind the last token, what stands in for the next hidden row) of a head."""
    kept, decoder = list[Tensor](), head.get_decoder()
    hook = decoder.register_forward_hook(lambda _, args, out: kept.append(out[0][:, -1:]))
    head.given.take(hidden)
    logits = type(head).forward(head, tokens, positions, cache)["logits"]
    hook.remove()
    return logits[:, -1], kept[0]


def with_nextn(path: Path, architecture: str) -> Path:
    """The file with its last layer once more as one that predicts, behind a projection and norms
    of its own."""
    values, tensors = fields_of(path, f"{architecture}."), dict(tensors_of(path))
    words = {key: v for key, v in fields_of(path).items() if key.startswith("tokenizer.")}
    count, size = values["block_count"], values["embedding_length"]
    last = {n: t for n, t in tensors.items() if n.startswith(f"blk.{count - 1}.")}
    tensors |= {n.replace(f"blk.{count - 1}.", f"blk.{count}."): t for n, t in last.items()}
    norm = tensors["output_norm.weight"][0]
    joined = torch.randn(size, 2 * size)
    format = "f32" if 2 * size % 32 else "q8_0"
    stored = joined if format == "f32" else torch.ops.metalmm.quantize(joined, format)
    tensors |= {
        f"blk.{count}.nextn.eh_proj.weight": (stored.numpy(), format),
        f"blk.{count}.nextn.enorm.weight": (np.ascontiguousarray(norm[::-1]), "f32"),
        f"blk.{count}.nextn.hnorm.weight": (np.roll(norm, 1), "f32"),
        f"blk.{count}.nextn.shared_head_norm.weight": (np.roll(norm, 2), "f32"),
    }
    values |= {"block_count": count + 1, "nextn_predict_layers": 1}
    return write_gguf(
        path.with_name("with.gguf"), architecture, tensors, values, words, tokenizer=False
    )

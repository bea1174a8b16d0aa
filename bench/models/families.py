"""How many ops a token takes in families of transformers, before and after fuse_(cache="q8_0").

Random models of few and narrow layers: the ops are those of any size. Counted are calls of ops of
torch and of ours that are no views, of one token behind a prompt, on the CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

from torch_metalmm import PackedCache, fuse_, quantize_
from torch_metalmm.models.cache_argument import cache_in, with_cache

from ..devices import ROOT
from ..report import model_tables
from ..runner import Record, Run
from ..tables import replace_block, status, to_markdown
from .op_counts import Calls

PAGE = ROOT / "docs" / "guide" / "fuse.md"
COMMAND = "tokens --ops"


def sizes(hidden: int, intermediate: int, vocabulary: int = 320, **others: Any) -> dict[str, Any]:
    """Values of the config of a small model; others beside these, or in place of them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | others


SIZES = sizes(128, 128, head_dim=32)
_CHOSEN = {"num_experts_per_tok": 2}
_EXPERTS = _CHOSEN | {"num_experts": 8, "moe_intermediate_size": 64}
_LOCAL = _CHOSEN | {"num_local_experts": 8}
_ROUTED = _CHOSEN | {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 64}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_PER_LAYER = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 32}
# transformers fills a prompt up to whole chunks, which are of 256 tokens.
_CHUNK = 16
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_chunk_size": _CHUNK}

# {model_type of transformers: options}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "smollm3": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "exaone4": {},
    "gemma2": {},
    "gemma3_text": _TWO_KINDS,
    "gemma3n_text": _TWO_KINDS
    | _PER_LAYER
    | {"laurel_rank": 32, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4_text": _TWO_KINDS
    | {"num_kv_shared_layers": 0, "global_head_dim": 64, "hidden_size_per_layer_input": 0},
    "glm4": {},
    "helium": {},
    "ernie4_5": {},
    "seed_oss": {},
    "starcoder2": {},
    "stablelm": {},
    "cohere2": {},
    "nanochat": {},
    "mixtral": _LOCAL,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": _LOCAL,
    "olmoe": _CHOSEN | {"num_experts": 8},
    "granitemoe": _LOCAL,
    "glm4_moe": _ROUTED,
    "minimax_m2": _LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64},
    "afmoe": _EXPERTS | {"num_shared_experts": 1},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | _SHARED,
    "qwen2_moe": _SHARED | {"shared_expert_intermediate_size": 128},
    "qwen3_next": LINEAR | _SHARED | {"mlp_only_layers": []},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 64,
        "n_groups": 2,
        "chunk_size": _CHUNK,
        "time_step_limit": (0.01, 2.0),
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": _CHUNK,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_chunk_size": _CHUNK,
        "mlp_multipliers": [0.75, 0.6],
        "ssm_multipliers": [0.35, 0.3, 0.4, 0.5, 0.7],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "embedding_multiplier": 5.6,
        "lm_head_multiplier": 0.02,
    },
}


def new_model(
    kind: str, values: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A causal model of transformers with its own random weights, in eval mode, the same at every
    call; values of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **values)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def family(kind: str, format: str = "q8_0", **options: Any) -> Any:
    """A random packed model in eval mode, the same at every call; norms that are not ones."""
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")  # layers that the format does not fit
        model = new_model(kind, SIZES | FAMILIES[kind] | options)
        for parameter in model.parameters():
            # Larger branches than those of a new model, and norms that are not ones.
            noise = torch.randn(parameter.shape) / 8
            parameter.data = parameter.data * 2 if parameter.dim() > 1 else parameter.data + noise
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)
        return quantize_(model, format, progress=False)


def fused_family(model: Any) -> Any:
    """A copy after fuse_(cache="q8_0")."""
    return fuse_(copy.deepcopy(model), "swiglu", cache="q8_0")


def ops_of(model: Any, cache: Any = None) -> tuple[list[int], int]:
    """(those of each layer, those beside them) of one token after a prompt of three.

    cache: an empty one; None: the model's own.
    """
    calls = Calls()
    with torch.inference_mode(False), torch.no_grad():
        prompt = model(torch.tensor([[5, 6, 7]]), use_cache=True, **with_cache(model, cache))
        calls.watch(model.get_decoder().layers)
        token = {"input_ids": torch.tensor([[8]]), "position_ids": torch.tensor([[3]])}
        with calls:
            model(**token, use_cache=True, **with_cache(model, cache_in(prompt)))
        calls.unwatch()
    return [len(ours) + len(others) for ours, others in calls.of_layers], len(calls.outside())


def record(kind: str, model: Any, fused: Any) -> Record:
    """The row of a family: a packed model, and the same one after fuse_."""
    found: Record = {"kind": "ops", "model": versions(), "family": kind}
    cached = ops_of(fused, PackedCache(fused.config, "q8_0"))
    pairs = {"before": ops_of(model), "after": cached}
    for name, (layers, beside) in pairs.items():
        found |= {f"layers_{name}": layers, f"beside_{name}": beside}
    return found


def versions() -> str:
    """The versions that the numbers of ops depend on."""
    numbers = (version(name).partition("+")[0] for name in ("transformers", "torch"))
    return "transformers {}, torch {}".format(*numbers)


def run(run: Run) -> Iterator[Record]:
    """One record per family; with --write, also the block of the page."""
    found = []
    for kind in FAMILIES:
        status(kind)
        with torch.inference_mode(False):
            model = family(kind)
            found.append(record(kind, model, fused_family(model)))
        yield found[-1]
    if run.args.write:
        replace_block(PAGE, COMMAND, to_markdown(*model_tables(found)))

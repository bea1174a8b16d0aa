"""The architectures whose files are converted here: transformers' models, and what files state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gguf_files import HEADS, H

HEAD = H // HEADS


@dataclass(frozen=True)
class Case:
    """A model: the class of its config, its own values, and what a file of it has.

    interleaved: the converter turns the halves of each head's q and k into pairs. plus_one: it adds
    1 to the weights of norms. eps: which of the two keys it has. alternating: rows of gate and up
    alternate, and experts lie [E, K, rows]; columns: the latter alone. stacks: keys and values of a
    latent are two stacks. rope: parts of the rotation besides its base. aliases: ends of names in
    the model, and those in the file.
    """

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    turned: int = HEAD
    interleaved: bool = False
    plus_one: bool = False
    eps: str = "rms"
    alternating: bool = False
    columns: bool = False
    stacks: bool = False
    rope: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


_EXPERTS = {"expert_count": 8, "expert_used_count": 3}
_WIDTH = {"moe_intermediate_size": 256}
_ROUTED = _WIDTH | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_ROUTED_FILE = _EXPERTS | {
    "expert_feed_forward_length": 256,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}
_CORRECTED = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_YARN_FILE = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
_SCALES = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}
_LATENT = {
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": HEAD,
    "v_head_dim": 64,
    "num_key_value_heads": HEADS,
}
_LATENT_FILE = {
    "attention.kv_lora_rank": 256,
    "attention.head_count_kv": HEADS,
    "attention.key_length": 64 + HEAD,
    "attention.value_length": 64,
}
_STACKS_FILE = {
    "attention.kv_lora_rank": 256,
    "attention.head_count_kv": 1,
    "attention.key_length": 256 + HEAD,
    "attention.value_length": 256,
    "attention.key_length_mla": 64 + HEAD,
    "attention.value_length_mla": 64,
}

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
            "rope.scaling.yarn_log_multiplier": 1.0,
            **_YARN_FILE,
        },
        interleaved=True,
        rope=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125},
    ),
    "olmo": Case(
        "Olmo", {"clip_qkv": 2.0}, {"attention.clamp_kqv": 2.0}, interleaved=True, eps="layer"
    ),
    "olmo2": Case("Olmo2", theta=5e5),
    "phi2": Case("Phi", turned=HEAD // 2, eps="layer"),
    "seed_oss": Case(
        "SeedOss",
        {"head_dim": HEAD, "attention_bias": True},
        {"attention.key_length": HEAD},
    ),
    "smollm3": Case("SmolLM3", {"pad_token_id": 2}, theta=5e6, interleaved=True),
}
EXPERTS = {
    "deepseek2": Case(
        "DeepseekV2",
        _ROUTED
        | _LATENT
        | {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "q_lora_rank": None},
        _ROUTED_FILE
        | _LATENT_FILE
        | _YARN_FILE
        | {"expert_weights_norm": False, "expert_gating_func": 1, "attention.q_lora_rank": 0}
        | {"rope.scaling.yarn_log_multiplier": 0.0707},
        rope=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek2+": Case(
        "DeepseekV3",
        _ROUTED | _LATENT | {"q_lora_rank": 256},
        _ROUTED_FILE
        | _STACKS_FILE
        | _YARN_FILE
        | {"attention.q_lora_rank": 256, "rope.scaling.yarn_log_multiplier": 0.1},
        stacks=True,
        rope=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        aliases=_CORRECTED,
    ),
    "dots1": Case(
        "Dots1",
        {"head_dim": HEAD, "num_key_value_heads": HEADS, **_ROUTED},
        _ROUTED_FILE | {"attention.head_count_kv": HEADS},
        aliases=_CORRECTED,
    ),
    "ernie4_5-moe": Case(
        "Ernie4_5_Moe",
        _WIDTH
        | {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
        },
        _EXPERTS
        | {
            "expert_feed_forward_length": 256,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 512,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 2,
        },
        theta=5e5,
        aliases={"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "glm4moe": Case(
        "Glm4Moe",
        {"head_dim": HEAD, "attention_bias": True, "use_qk_norm": True, **_ROUTED},
        _ROUTED_FILE,
        theta=1e6,
        turned=HEAD // 2,
        aliases=_CORRECTED,
    ),
    "gpt-oss": Case(
        "GptOss",
        {
            "head_dim": HEAD,
            "intermediate_size": 256,
            "sliding_window": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        _EXPERTS
        | _YARN_FILE
        | {
            "attention.key_length": HEAD,
            "attention.sliding_window": 8,
            "feed_forward_length": 256,
            "expert_feed_forward_length": 256,
        },
        theta=150000.0,
        alternating=True,
        rope=_YARN | {"truncate": False},
    ),
    "granitemoe": Case(
        "GraniteMoe",
        {
            **_SCALES,
            "attention_multiplier": 0.25,
            "logits_scaling": 8.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
        {
            "embedding_scale": 2.0,
            "residual_scale": 0.5,
            "attention.scale": 0.25,
            "logit_scale": 8.0,
            **_EXPERTS,
        },
        interleaved=True,
        aliases={"block_sparse_moe.router.weight": "ffn_gate_inp.weight"},
    ),
    "llama+": Case(
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3},
        _EXPERTS,
        interleaved=True,
    ),
    "llama4": Case(
        "Llama4Text",
        {
            "head_dim": HEAD,
            "intermediate_size": 256,
            "intermediate_size_mlp": 512,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "interleave_moe_layer_step": 2,
        },
        _EXPERTS
        | {
            "attention.key_length": HEAD,
            "expert_feed_forward_length": 256,
            "interleave_moe_layer_step": 2,
        },
        theta=5e5,
        columns=True,
        rope={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "olmoe": Case(
        "Olmoe",
        {
            "num_key_value_heads": HEADS,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        {"attention.head_count_kv": HEADS, **_EXPERTS},
    ),
    "qwen2moe": Case(
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 512,
            **_WIDTH,
        },
        {
            "expert_feed_forward_length": 256,
            "expert_shared_feed_forward_length": 512,
            **_EXPERTS,
        },
    ),
    "qwen3moe": Case(
        "Qwen3Moe",
        {
            "head_dim": HEAD,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            **_WIDTH,
        },
        {"attention.key_length": HEAD, "expert_feed_forward_length": 256, **_EXPERTS},
    ),
}
CASES |= EXPERTS


def architecture_of(case: str) -> str:
    return case.removesuffix("+")

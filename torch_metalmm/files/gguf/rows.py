"""The architectures of GGUF files as rows: what transformers does not read, what save_gguf writes.

A row says under which names a file and a transformers config state the same value. Read this way a
row gives the config of a file; read the other way, the metadata of a model. What every decoder has,
the width of its heads and its rotation, is not in the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .routing import GATING, SIGMOID, SOFTMAX

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_RMS = SIZES | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_NORM = SIZES | {"attention.layer_norm_epsilon": "layer_norm_eps"}
GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_CHOSEN = {"expert_used_count": "num_experts_per_tok"}
_LOCAL = _RMS | _CHOSEN | {"expert_count": "num_local_experts"}
_EXPERTS = _RMS | _CHOSEN | {"expert_count": "num_experts"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
# DeepSeek's choice of experts, and that of models which took it over.
_ROUTED = (
    _RMS
    | _CHOSEN
    | _WIDTH
    | {
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
    }
)
_CORRECTED = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_SIGMOID = {GATING: SIGMOID}
# What llama.cpp takes where a file has no key: older converters wrote no groups.
_ROUTED_ELSE = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}
# Of Mistral's models in these files, which scale queries by their position.
_NO_TEMPERATURE = {"attention.temperature_scale": 0}
_CHUNKED = {"attention.sliding_window": 8192}  # another value: not the layers of Llama 4
_QWEN2_MOE = "Qwen2MoeTensorProcessor"  # whose files have the shared expert's gate in one dimension
_LLAMA, _GEMMA = "LlamaTensorProcessor", "Gemma2TensorProcessor"
_LATENT, _CORRECTION = "LatentProcessor", "CorrectedProcessor"  # of processors.py

# Keys and values of a latent, which a file may have as two stacks.
_BOTH, _STACKS = "self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight")


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture, and the model of transformers that it is.

    keys: {key without the architecture's prefix: attribute of the config}. flags: {attribute that
    is whether the file has a tensor: its name}. processor: of transformers or of processors.py,
    which undoes what llama.cpp's converter did to values: it interleaves rows of q and k, or adds 1
    to norms. reads: whether the config of a file is made by the row, not by transformers. writes:
    whether a model of this type is saved as this architecture. states: values by their keys that a
    file of the architecture may only state so. has: attributes of the config that no key says, or
    whose key a file may leave out. derived: {attribute: what it is by the others}. computed: {key:
    what it is by the config}, which a read takes from the others. names: ends of names in the model
    that the gguf package does not know, and those in the file. latent: whether its heads share a
    latent of keys and values (latent.py).
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _RMS)
    flags: Mapping[str, str] = field(default_factory=dict)
    processor: str = "TensorProcessor"
    reads: bool = True
    writes: bool = True
    states: Mapping[str, int] = field(default_factory=dict)
    has: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    latent: bool = False

    @property
    def leaves(self) -> list[tuple[str, str]]:
        """(end of a name in the file, end of the model's) of names that gguf does not know."""
        own = [(leaf, end) for end, leaf in self.names.items()]
        return own + [(leaf, _BOTH) for leaf in _STACKS if self.latent]


ARCHITECTURES = {
    # Read by transformers
    "llama": Architecture("llama", reads=False),
    "qwen2": Architecture("qwen2", reads=False),
    "qwen3": Architecture("qwen3", reads=False),
    "gemma2": Architecture("gemma2", _RMS | WINDOW | _CAPS, reads=False),
    "gemma3": Architecture("gemma3_text", _RMS | WINDOW, reads=False),
    "phi3": Architecture("phi3", _RMS | WINDOW, reads=False),
    # Read by these rows
    "arcee": Architecture("arcee", processor=_LLAMA),
    "command-r": Architecture(
        "cohere",
        _NORM | {"logit_scale": "logit_scale"},
        {"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": Architecture("cohere2", _NORM | WINDOW | {"logit_scale": "logit_scale"}),
    "ernie4_5": Architecture("ernie4_5"),
    "deepseek2": Architecture(
        "deepseek_v2",
        _ROUTED,
        processor=_LATENT,
        states={GATING: SOFTMAX, "expert_weights_norm": False} | _NO_TEMPERATURE,
        has=_ROUTED_ELSE,
        derived={"topk_method": lambda v: "group_limited_greedy" if v["n_group"] > 1 else "greedy"},
        latent=True,
    ),
    "dots1": Architecture("dots1", _ROUTED, states=_SIGMOID, has=_ROUTED_ELSE, names=_CORRECTED),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        _RMS
        | _WIDTH
        | {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        {"use_bias": "blk.0.attn_q.bias"},
        processor=_CORRECTION,
        computed={
            "expert_shared_feed_forward_length": lambda config: (
                config.moe_intermediate_size * config.moe_num_shared_experts
            )
        },
        names={"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "gemma": Architecture("gemma", processor=_GEMMA),
    "glm4": Architecture("glm4", flags={"attention_bias": "blk.0.attn_q.bias"}),
    "glm4moe": Architecture(
        "glm4_moe",
        _ROUTED,
        {"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        states=_SIGMOID,
        has=_ROUTED_ELSE,
        names=_CORRECTED,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _LOCAL | WINDOW | {"expert_feed_forward_length": "intermediate_size"},
        has={"rope_parameters.truncate": False},
    ),
    "granite": Architecture("granite", _RMS | GRANITE, processor=_LLAMA),
    "granitemoe": Architecture(
        "granitemoe",
        _LOCAL | GRANITE,
        processor=_LLAMA,
        names={"block_sparse_moe.router.weight": "ffn_gate_inp.weight"},
    ),
    "llama4": Architecture(
        "llama4_text",
        {key: name for key, name in _LOCAL.items() if key != "feed_forward_length"}
        | {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        {"attention_bias": "blk.0.attn_q.bias"},
        states=_CHUNKED,
        # By their number alone llama.cpp knows Scout's 16 from Maverick's, which norms no heads.
        derived={"use_qk_norm": lambda v: v["num_local_experts"] != 128},
    ),
    "mistral3": Architecture(
        "ministral3",
        _RMS | {"attention.temperature_scale": "rope_parameters.llama_4_scaling_beta"},
        processor=_LLAMA,
    ),
    "olmo": Architecture("olmo", SIZES | {"attention.clamp_kqv": "clip_qkv"}, processor=_LLAMA),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", _EXPERTS),  # llama.cpp clips nothing
    "phi2": Architecture("phi", _NORM),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _EXPERTS
        | _WIDTH
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        processor=_QWEN2_MOE,
    ),
    "qwen2vl": Architecture("qwen2", writes=False),  # for text its rotation in 3 parts is that of 1
    "qwen3moe": Architecture(
        "qwen3_moe", _EXPERTS | _WIDTH, processor=_QWEN2_MOE, has={"norm_topk_prob": True}
    ),
    "qwen3vl": Architecture("qwen3", writes=False),
    "seed_oss": Architecture("seed_oss", flags={"attention_bias": "blk.0.attn_q.bias"}),
    "smollm3": Architecture("smollm3", processor=_LLAMA),
}
# Of a name that two models have, the row of files in which a key is this; None: anything but 0.
VARIANTS: dict[str, tuple[str, int | None, Architecture]] = {
    "llama": ("expert_count", None, Architecture("mixtral", _LOCAL, processor=_LLAMA)),
    "deepseek2": (
        GATING,
        SIGMOID,
        Architecture(
            "deepseek_v3",
            _ROUTED,
            processor=_LATENT,
            states=_SIGMOID | _NO_TEMPERATURE,
            has=_ROUTED_ELSE,
            names=_CORRECTED,
            latent=True,
        ),
    ),
}
STORED_AS = {"mistral": "llama", "cohere": "command-r"}  # model_type: llama.cpp's architecture


def row_of(architecture: str, metadata: Mapping[str, Any]) -> Architecture | None:
    """The row of a file of that architecture with these values."""
    if architecture in VARIANTS:
        key, wanted, row = VARIANTS[architecture]
        value = metadata.get(f"{architecture}.{key}")
        if value == wanted if wanted is not None else value:
            return row
    return ARCHITECTURES.get(architecture)


def all_rows() -> list[tuple[str, Architecture]]:
    """(architecture, row) of each row."""
    return [*ARCHITECTURES.items(), *((name, row) for name, (_, _, row) in VARIANTS.items())]

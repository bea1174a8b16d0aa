"""The architectures of GGUF files as rows: what load_gguf reads, what save_gguf writes.

A row says under which names a file and a transformers config state the same value. Read this way a
row gives the config of a file; read the other way, the metadata of a model. What every decoder has,
the width of its heads and its rotation, is not in the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import derive
from .routing import GATING, SIGMOID, SOFTMAX

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_RMS = SIZES | {RMS: "rms_norm_eps"}
_NORM = SIZES | {LAYER: "layer_norm_eps"}
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
# Values that llama.cpp takes where a file has no key: older converters wrote no groups.
_ROUTED_ELSE = {
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}
_ROTATED = {"rope.scaling.finetuned": True}  # whether Granite has a rotation
# Another value: Mistral's models in these files, which scale queries by their position.
_NO_TEMPERATURE = {"attention.temperature_scale": 0}
_CHUNKED = {"attention.sliding_window": 8192}  # another value: not the layers of Llama 4
_LLAMA, _GEMMA = "LlamaTensorProcessor", "Gemma2TensorProcessor"
_LATENT, _CORRECTION = "LatentProcessor", "CorrectedProcessor"  # classes in processors.py
# Flags of every row whose config has such an attribute.
BIASES = {
    "attention_bias": "attn_(q|qkv|kv_a_mqa).bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "projectors_bias": "ssm_out.bias",
}
_SSM_BIASES = {"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"}
_IN_BIAS = {"use_bias": "ssm_in.bias"}
_SSM = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_QWEN35 = _RMS | {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_QWEN35_EXPERTS = _QWEN35 | _CHOSEN | _WIDTH | _SHARED_WIDTH | {"expert_count": "num_experts"}
_RECURRENT = {
    "attention.recurrent_layers": derive.qwen35_recurrent,
    "full_attention_interval": derive.full_attention_interval,
    "ssm.inner_size": derive.rows_of_values,
}
_RECURRENT_READ = {"layer_types": derive.qwen35_layers, "linear_value_head_dim": derive.ssm_head}
_T5 = {
    "context_length": "n_positions",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    LAYER: "layer_norm_epsilon",
    "decoder_start_token_id": "decoder_start_token_id",
}
_MAMBA = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    RMS: "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
    "ssm.inner_size": "intermediate_size",
}

# Keys and values of a latent, which a file may have as two stacks.
_BOTH, _STACKS = "self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight")


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture, and the model of transformers that it is.

    keys: {key without the architecture's prefix: attribute of the config}. flags: {attribute that
    is whether a block of the file has a tensor: a pattern of its name's end}. processor: of
    transformers or of processors.py, which undoes what llama.cpp's converter did to values: it
    interleaves rows of q and k, or adds 1 to norms. rotates: whether the model has a rotation.
    writes: whether a model of this type is saved as this architecture. states: values by their keys
    that a file of the architecture may only state so. has: attributes of the config that no key
    says, or whose key a file may leave out. derived: {attribute: what it is by the others and the
    file}. computed: {key: what it is by the config}, which a read takes from the others. stated:
    {attribute: what the file's config has in its place}, of models that say the same in two ways.
    names: ends of names in the model that the gguf package does not know, and those in the file.
    joined: {end of a name in the model: {end of a tensor whose rows it has: how many, by the
    config}}; the processor is given all of them, one after the other, under the first's name.
    parameters: {end of a name in the model: the whole key of the numbers that its layers have}.
    latent: whether its heads share a latent of keys and values (latent.py). spoiled: a pattern of
    the names' ends of biases that are refused, as llama.cpp's converter writes others than the
    model's. condition: of a row of VARIANTS, a key and its value in files of the row; None:
    anything but 0.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _RMS)
    flags: Mapping[str, str] = field(default_factory=dict)
    processor: str = "TensorProcessor"
    rotates: bool = True
    writes: bool = True
    states: Mapping[str, int] = field(default_factory=dict)
    has: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, derive.Rule] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    stated: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, Mapping[str, Callable[[Any], int]]] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    latent: bool = False
    spoiled: str = ""
    condition: tuple[str, int | None] = "", None

    def as_stated(self, config: Any) -> Any:
        """The config of a model in the words of its files."""
        out = copy.deepcopy(config)
        for name, of in self.stated.items():
            setattr(out, name, of(config))
        return out

    @property
    def leaves(self) -> list[tuple[str, str]]:
        """(end of a name in the file, end of the model's) of names that gguf does not know."""
        own = [(leaf, end) for end, leaf in self.names.items()]
        own += [(leaf, end) for end, leaves in self.joined.items() for leaf in leaves]
        return own + [(leaf, _BOTH) for leaf in _STACKS if self.latent]


_SCALE = {"query_pre_attn_scalar": derive.gemma_scale}
_WINDOWS = {"layer_types": derive.windows}
# Granite-Hybrid's, whose files are Granite's or Granite-MoE's where no layer has a state.
_SHARED_MLP = {"expert_shared_feed_forward_length": "shared_intermediate_size"}
_HEADS = {"num_key_value_heads": derive.most_kv_heads}
_SHARED, _SHARED_EXPERT = (
    {"shared_mlp.input_linear.weight": dict.fromkeys(leaves, derive.rows_of_shared)}
    for leaves in (
        ("ffn_gate.weight", "ffn_up.weight"),
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    )
)
_HYBRID = Architecture(
    "granitemoehybrid",
    _RMS | GRANITE | _SSM | _SHARED_MLP,
    _SSM_BIASES,
    processor="GraniteHybridProcessor",
    states={"expert_count": 0},
    has={"num_local_experts": 0, "num_experts_per_tok": 0},
    derived=_HEADS
    | {
        "layer_types": derive.granite_layers,
        "position_embedding_type": derive.granite_rotation,
        "mamba_d_head": derive.ssm_head,
        "mamba_expand": derive.ssm_expand,
    },
    computed={
        "attention.head_count_kv": derive.granite_kv_heads,
        "expert_used_count": lambda config: config.num_experts_per_tok,
        "rope.scaling.finetuned": lambda config: config.position_embedding_type == "rope",
        "ssm.inner_size": lambda config: config.mamba_expand * config.hidden_size,
    },
    stated={
        "position_embedding_type": lambda c: c.position_embedding_type or "nope",
        "num_experts_per_tok": lambda c: c.num_experts_per_tok if c.num_local_experts else 0,
    },
    names={
        "mamba.dt_bias": "ssm_dt.bias",
        "mamba.A_log": "ssm_a",
        "mamba.D": "ssm_d",
        "shared_mlp.output_linear.weight": "ffn_down.weight",
    },
    joined=_SHARED,
)
_MIXED = {
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
}

ARCHITECTURES = {
    "apertus": Architecture(
        "apertus",
        writes=False,
        parameters={f"act_fn.{name}": f"xielu.{name}" for name in derive.XIELU},
    ),
    "arcee": Architecture("arcee", processor=_LLAMA),
    "bloom": Architecture(
        "bloom",
        {
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            LAYER: "layer_norm_epsilon",
        },
        processor="BloomTensorProcessor",
        rotates=False,
        writes=False,
        has={"tie_word_embeddings": True},
    ),
    "command-r": Architecture(
        "cohere",
        _NORM | {"logit_scale": "logit_scale"},
        {"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": Architecture("cohere2", _NORM | WINDOW | {"logit_scale": "logit_scale"}),
    "ernie4_5": Architecture("ernie4_5", flags={"use_bias": "attn_q.bias"}),
    "deepseek2": Architecture(
        "deepseek_v2",
        _ROUTED,
        processor=_LATENT,
        states={GATING: SOFTMAX, "expert_weights_norm": False} | _NO_TEMPERATURE,
        has=_ROUTED_ELSE,
        derived={"topk_method": derive.deepseek_choice},
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
        {"use_bias": "attn_q.bias"},
        processor=_CORRECTION,
        computed={
            "expert_shared_feed_forward_length": lambda config: (
                config.moe_intermediate_size * config.moe_num_shared_experts
            )
        },
        names={"mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "exaone4": Architecture(
        "exaone4", _RMS | WINDOW, writes=False, has={"sliding_window": None}, derived=_WINDOWS
    ),
    "falcon": Architecture(
        "falcon",
        {
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count": "num_attention_heads",
            LAYER: "layer_norm_epsilon",
        },
        {"new_decoder_architecture": "attn_norm_2.weight", "bias": "attn_qkv.bias"},
        processor="FalconProcessor",
        writes=False,
        has={"tie_word_embeddings": True},
        derived={
            "num_kv_heads": lambda v, f: v["num_key_value_heads"],
            "multi_query": lambda v, f: v["num_key_value_heads"] == 1,
        },
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        _RMS | _SSM | {"ssm.inner_size": "mamba_d_ssm"},
        _SSM_BIASES | {"mamba_rms_norm": "ssm_norm.weight"},
        processor="HybridProcessor",
        # The converter multiplies the weights by each.
        has={f"{name}_multiplier": 1.0 for name in derive.FALCON_H1}
        | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
        | {"mamba_norm_before_gate": False},
        derived={"mamba_d_head": derive.ssm_head},
        # Without the norm it is before nothing.
        stated={"mamba_norm_before_gate": lambda c: c.mamba_rms_norm and c.mamba_norm_before_gate},
        names={
            "mamba.dt_bias": "ssm_dt.bias",
            "mamba.A_log": "ssm_a",
            "mamba.D": "ssm_d",
            "pre_ff_layernorm.weight": "ffn_norm",
            "feed_forward.gate_proj.weight": "ffn_gate.weight",
            "feed_forward.up_proj.weight": "ffn_up.weight",
            "feed_forward.down_proj.weight": "ffn_down.weight",
        },
        spoiled=r"attn_[qkv]\.bias",  # times attention_in_multiplier, which scales x alone
    ),
    "gemma": Architecture("gemma", processor=_GEMMA),
    "gemma2": Architecture(
        "gemma2",
        _RMS | WINDOW | _CAPS,
        processor=_GEMMA,
        has={"sliding_window": 4096, "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0},
        derived=_SCALE,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _RMS | WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        processor=_GEMMA,
        has={"sliding_window": None, "final_logit_softcapping": None},
        derived=_SCALE
        | {"layer_types": derive.gemma3_windows, "rope_parameters": derive.gemma3_rotations},
    ),
    # Two sizes of heads, one rotation each, and layers that share keys.
    "gemma4": Architecture(
        "gemma4_text",
        {key: name for key, name in _RMS.items() if key != "feed_forward_length"}
        | WINDOW
        | {
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        rotates=False,
        writes=False,
        has={"eos_token_id": [1, 106, 50], "hidden_size_per_layer_input": 0},
        derived=derive.GEMMA4,
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture(
        "glm4_moe",
        _ROUTED,
        {"use_qk_norm": "attn_q_norm.weight"},
        states=_SIGMOID,
        has=_ROUTED_ELSE,
        names=_CORRECTED,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _LOCAL | WINDOW | {"expert_feed_forward_length": "intermediate_size"},
        has={"rope_parameters.truncate": False},
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            LAYER: "layer_norm_epsilon",
        },
        processor="GPT2TensorProcessor",
        rotates=False,
        writes=False,
        derived={"n_inner": derive.feed_forward},
    ),
    "granite": Architecture(
        "granite",
        _RMS | GRANITE | _SHARED_MLP,
        processor=_LLAMA,
        states=_ROTATED,
        derived=_HEADS,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        _LOCAL | GRANITE,
        processor=_LLAMA,
        states=_ROTATED,
        derived=_HEADS,
        names={"block_sparse_moe.router.weight": "ffn_gate_inp.weight"},
    ),
    "granitehybrid": _HYBRID,
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        writes=False,
        names={
            "self_attn.query_layernorm.weight": "attn_q_norm.weight",
            "self_attn.key_layernorm.weight": "attn_k_norm.weight",
        },
    ),
    "lfm2": Architecture(
        "lfm2",
        SIZES | {RMS: "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        {"conv_bias": "shortconv.in_proj.bias"},
        processor="Lfm2TensorProcessor",
        computed={"attention.head_count_kv": derive.lfm2_kv_heads},
        has={"block_auto_adjust_ff_dim": False},  # the width is the adjusted one
        stated={
            "intermediate_size": derive.lfm2_width,
            "block_auto_adjust_ff_dim": lambda config: False,
            # The numbers of the adjustment, as a new config has them.
            "block_ffn_dim_multiplier": lambda config: 1.0,
            "block_multiple_of": lambda config: 256,
            "full_attn_idxs": lambda config: None,  # layer_types says so, too
            "conv_bias": derive.lfm2_bias,
        },
        derived=_HEADS | {"layer_types": derive.lfm2_layers},
    ),
    "llama": Architecture("llama", processor=_LLAMA),
    "llama4": Architecture(
        "llama4_text",
        {key: name for key, name in _LOCAL.items() if key != "feed_forward_length"}
        | {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        states=_CHUNKED,
        # llama.cpp tells Scout's 16 experts from Maverick's, which norms no heads, by number.
        derived={"use_qk_norm": lambda v, f: v["num_local_experts"] != 128},
    ),
    "mistral3": Architecture(
        "mistral", processor=_LLAMA, writes=False, has={"sliding_window": None}
    ),
    "olmo": Architecture(
        "olmo",
        SIZES | {"attention.clamp_kqv": "clip_qkv"},
        processor=_LLAMA,
        spoiled=r"attn_[qk]\.bias",  # in another order than the rows of the weight
    ),
    "mamba": Architecture(
        "mamba", _MAMBA, _IN_BIAS, processor="MambaTensorProcessor", rotates=False, writes=False
    ),
    "mamba2": Architecture(
        "mamba2",
        {key: name for key, name in _MAMBA.items() if name != "intermediate_size"}
        | {"ssm.group_count": "n_groups", "ssm.time_step_rank": "num_heads"},
        _IN_BIAS | {"use_conv_bias": "ssm_conv1d.bias"},
        processor="HybridProcessor",
        rotates=False,
        writes=False,
        derived={"head_dim": derive.ssm_head, "expand": derive.ssm_expand},
        names={"mixer.dt_bias": "ssm_dt.bias", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        _LOCAL | {"rope.dimension_count": "rotary_dim"},
        processor="MiniMaxM2TensorProcessor",
        writes=False,
        has={"use_routing_bias": True},
        derived={"scoring_func": derive.scoring},
    ),
    "nemotron": Architecture(
        "nemotron",
        SIZES | {RMS: "norm_eps", LAYER: "norm_eps"},
        processor="NemotronTensorProcessor",
        writes=False,
    ),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", _EXPERTS),  # llama.cpp clips nothing
    "phi2": Architecture("phi", _NORM, derived={"intermediate_size": derive.feed_forward}),
    "phi3": Architecture(
        "phi3",
        _RMS | WINDOW,
        has={"sliding_window": None},
        derived={"rope_parameters": derive.phi3_rotation}
        | {"original_max_position_embeddings": derive.phi3_context},
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2_moe", _EXPERTS | _WIDTH | _SHARED_WIDTH, processor="GateProcessor"
    ),
    "qwen2vl": Architecture("qwen2", writes=False),  # for text its rotation in 3 parts is that of 1
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture(
        "qwen3_5_text",
        _QWEN35,
        computed=_RECURRENT
        | {"rope.dimension_sections": lambda c: [*c.rope_parameters["mrope_section"], 0]},
        stated={"rope_parameters": derive.qwen35_sections},
        derived=_RECURRENT_READ | {"rope_parameters": derive.qwen35_rotation},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", _EXPERTS | _WIDTH, processor="GateProcessor", has={"norm_topk_prob": True}
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _QWEN35_EXPERTS,
        processor="KindsProcessor",
        has={"norm_topk_prob": True},
        computed=_RECURRENT,
        derived=_RECURRENT_READ,
        names={"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"},
        # Files of 2025 have one matrix, ssm_in, in the order of the model's.
        joined={
            "linear_attn.in_proj_qkvz.weight": {
                "attn_qkv.weight": derive.rows_of_convolution,
                "attn_gate.weight": derive.rows_of_values,
            }
        },
    ),
    "qwen3vl": Architecture("qwen3", writes=False),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", processor=_LLAMA),
    "stablelm": Architecture(
        "stablelm",
        _NORM,
        {"use_qkv_bias": "attn_q.bias"},
        writes=False,
        derived={"use_parallel_residual": lambda v, f: "blk.0.ffn_norm.weight" not in f.tensors},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        SIZES | {LAYER: "norm_epsilon"},
        {"use_bias": "attn_q.bias"},
        writes=False,
        has={"sliding_window": None},
    ),
    "t5": Architecture(
        "t5",
        _T5,
        processor="T5TensorProcessor",
        rotates=False,
        writes=False,
        derived={"feed_forward_proj": derive.t5_activation},
    ),
}
ARCHITECTURES["qwen35moe"] = replace(
    ARCHITECTURES["qwen35"],
    model_type="qwen3_5_moe_text",
    keys=_QWEN35_EXPERTS,
)
ARCHITECTURES["t5encoder"] = replace(ARCHITECTURES["t5"], has={"architectures": ["T5EncoderModel"]})
# The rows with a condition, for names that several models have.
VARIANTS = {
    "granitehybrid": replace(
        _HYBRID,
        keys={**_HYBRID.keys, **_LOCAL},
        condition=("expert_count", None),
        states={},
        names={**_HYBRID.names, **_MIXED},
        joined=_SHARED_EXPERT,
    ),
    "granitemoe": replace(
        ARCHITECTURES["granitemoe"],
        model_type="granitemoeshared",
        keys=_LOCAL | GRANITE | _SHARED_MLP,
        condition=("expert_shared_feed_forward_length", None),
        writes=False,
        names=_MIXED,
        joined=_SHARED_EXPERT,
    ),
    "mamba": replace(
        ARCHITECTURES["mamba"], model_type="falcon_mamba", condition=("ssm.dt_b_c_rms", None)
    ),
    "glm4": Architecture(
        "glm4",
        condition=("rope.dimension_sections", None),
        processor="HalvesProcessor",
        writes=False,
    ),
    "mistral3": Architecture(
        "ministral3",
        _RMS | {"attention.temperature_scale": "rope_parameters.llama_4_scaling_beta"},
        condition=("attention.temperature_scale", None),
        processor=_LLAMA,
    ),
    "olmo2": Architecture(
        "olmo3",
        _RMS | WINDOW,
        condition=("attention.sliding_window", None),
        writes=False,
        derived=_WINDOWS,
    ),
    "llama": Architecture("mixtral", _LOCAL, condition=("expert_count", None), processor=_LLAMA),
    "deepseek2": replace(
        ARCHITECTURES["deepseek2"],
        model_type="deepseek_v3",
        condition=(GATING, SIGMOID),
        states=_SIGMOID | _NO_TEMPERATURE,
        derived={},
        names=_CORRECTED,
    ),
}
STORED_AS = {"mistral": "llama", "cohere": "command-r"}  # model_type: llama.cpp's architecture


def row_of(architecture: str, metadata: Mapping[str, Any]) -> Architecture | None:
    """The row of a file of that architecture with these values."""
    if architecture in VARIANTS:
        row = VARIANTS[architecture]
        key, wanted = row.condition
        value = metadata.get(f"{architecture}.{key}")
        if value == wanted if wanted is not None else value:
            return row
    return ARCHITECTURES.get(architecture)


def is_of(architecture: str, row: Architecture, config: Any) -> bool:
    """Whether row_of gives the row for a file of the config."""
    variant = VARIANTS[architecture]
    key, _ = variant.condition
    value = getattr(config, variant.keys[key])
    return row_of(architecture, {f"{architecture}.{key}": value}) is row


def all_rows() -> list[tuple[str, Architecture]]:
    """(architecture, row) of each row."""
    return [*ARCHITECTURES.items(), *VARIANTS.items()]

"""Cases of converted_models.py: classes, and configs whose values are none of their defaults."""

from __future__ import annotations

from typing import Any

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD, H, FFN = 64, 3, 4, 2, 12, 40, 56
_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "tie_word_embeddings": False,
    **{f"{kind}_token_id": None for kind in ("pad", "bos", "eos")},
}
_RMS = _PLAIN | {"rms_norm_eps": 0.003}
_NORM = _PLAIN | {"layer_norm_eps": 0.003}
_ODD = _RMS | {"head_dim": HEAD}
_HALF = {
    "rope_parameters": _PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.5},
}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 700.0,
        "factor": 3.0,
        "original_max_position_embeddings": 32,
    },
}
_WINDOW = {"sliding_window": 5}
_CHOSEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_key_value_heads": HEADS,
}
_GRANITE = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.3,
}
_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # no key says it
_TURNED = {"rope_parameters": _BASE["rope_parameters"] | {"partial_rotary_factor": 0.4}}
_GEMMA = _ODD | _BASE | {"tie_word_embeddings": True}
_GEMMA4 = (
    _RMS
    | _WINDOW
    | {
        **{"tie_word_embeddings": True, "head_dim": HEAD, "global_head_dim": 16},
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        "final_logit_softcapping": 0.9,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    }
)
_CAPS = {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9}
_LINEAR = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 14}
_MAMBA2 |= {"mamba_d_conv": 3, "mamba_expand": 2, "mamba_chunk_size": 8}

_T5 = {"vocab_size": VOCABULARY, "d_model": H, "d_kv": HEAD, "d_ff": FFN, "num_layers": LAYERS}
_T5 |= {"num_heads": HEADS, "relative_attention_num_buckets": 8, "layer_norm_epsilon": 0.003}
_T5 |= {"decoder_start_token_id": 0}
# Case: (the class's name without ForCausalLM or LMHeadModel, values of its config).
# fmt: off
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", _RMS),
    "arcee": ("Arcee", _ODD),
    "bloom": ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": H, "n_layer": LAYERS, "n_head": 5}
              | {"layer_norm_epsilon": 0.003}),
    "cohere": ("Cohere", _NORM | {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere-normed": ("Cohere", _NORM | {"logit_scale": 0.3, "use_qk_norm": True,
                                         "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", _NORM | _WINDOW | {"logit_scale": 0.3, "tie_word_embeddings": True,
                                              "num_hidden_layers": 4, "head_dim": HEAD,
                                              "rotary_pct": 1.0}),
    "deepseek-v2": ("DeepseekV2", _RMS | _ROUTED | _LATENT
                    | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}),
    "deepseek-v2-lite": ("DeepseekV2", _RMS | _ROUTED | _LATENT
                         | {"topk_method": "greedy", "norm_topk_prob": False, "n_group": 1,
                            "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", _RMS | _ROUTED | _LATENT | {"scoring_func": "sigmoid"}),
    "dots1": ("Dots1", _ODD | _ROUTED),
    "ernie4_5": ("Ernie4_5", _ODD),
    "ernie4_5-moe": ("Ernie4_5_Moe", _RMS | {"moe_num_experts": 6, "moe_k": 2,
                     "moe_num_shared_experts": 2, "moe_intermediate_size": 24,
                     "moe_layer_start_index": 1, "moe_layer_interval": 1}),
    "exaone4": ("Exaone4", _ODD | _WINDOW | {"num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "exaone4-small": ("Exaone4", _ODD | {"sliding_window": None,
                      "layer_types": ["full_attention"] * LAYERS}),
    "falcon": ("Falcon", {"vocab_size": VOCABULARY, "hidden_size": H, "num_hidden_layers": LAYERS,
               "num_attention_heads": HEADS, "layer_norm_epsilon": 0.003, "multi_query": True,
               "num_kv_heads": 1,
               "parallel_attn": True, "bias": False, "new_decoder_architecture": False,
               "max_position_embeddings": 96} | _BASE),
    "falcon-new": ("Falcon", {"vocab_size": VOCABULARY, "hidden_size": H, "num_kv_heads": KV_HEADS,
                   "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                   "layer_norm_epsilon": 0.003, "new_decoder_architecture": True, "bias": False,
                   "max_position_embeddings": 96} | _BASE),
    "falcon-h1": ("FalconH1", _ODD | _MAMBA2 | {"mamba_d_ssm": 80, "mamba_rms_norm": True,
                  "mamba_norm_before_gate": False, "embedding_multiplier": 1.7,
                  "lm_head_multiplier": 0.7, "key_multiplier": 0.6, "attention_in_multiplier": 1.2,
                  "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.1,
                  "ssm_out_multiplier": 0.9, "mlp_multipliers": [0.7, 1.4],
                  "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]}),
    "falcon-h1-plain": ("FalconH1", _ODD | _MAMBA2 | {"mamba_d_ssm": 80, "mamba_rms_norm": False}),
    "falcon-mamba": ("FalconMamba", {"vocab_size": VOCABULARY, "hidden_size": H, "state_size": 6,
                     "num_hidden_layers": LAYERS, "conv_kernel": 3, "time_step_rank": 5,
                     "layer_norm_epsilon": 0.003, "intermediate_size": 80, "expand": 2}),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": ("Gemma2", _GEMMA | _WINDOW | _CAPS | {"query_pre_attn_scalar": HEAD,
                                                     "num_hidden_layers": 4}),
    "gemma2-27b": ("Gemma2", _GEMMA | _WINDOW | _CAPS | {"num_hidden_layers": 46, "head_dim": 6,
                   "query_pre_attn_scalar": 4, "hidden_size": 16, "intermediate_size": 8}),
    "gemma3": ("Gemma3", _GEMMA | _WINDOW | {"query_pre_attn_scalar": HEAD, "num_hidden_layers": 7,
               "rope_parameters": {
                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "gemma3-27b": ("Gemma3", _GEMMA | _WINDOW | {"num_hidden_layers": 62, "head_dim": 6,
                   "query_pre_attn_scalar": 4, "hidden_size": 16, "intermediate_size": 8,
                   "rope_parameters": {
                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "gemma4": ("Gemma4", _GEMMA4 | {"num_kv_shared_layers": 0}),
    "gemma4-shared": ("Gemma4", _GEMMA4 | {"hidden_size_per_layer_input": 10,
                      "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2,
                      "use_double_wide_mlp": True}),
    "gemma4-keys": ("Gemma4", _GEMMA4 | {"attention_k_eq_v": True,
                    "num_global_key_value_heads": 1}),
    "glm4": ("Glm4", _ODD | _HALF | {"attention_bias": True}),
    "glm4-moe": ("Glm4Moe", _ODD | _ROUTED | _HALF | {"attention_bias": True,
                                                          "use_qk_norm": True}),
    "gpt-oss": ("GptOss", _ODD | _LOCAL | _WINDOW | {"num_hidden_layers": 4, "rope_parameters":
                _YARN["rope_parameters"] | {"truncate": False}}),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": H, "n_layer": LAYERS, "n_head": HEADS,
                      "n_positions": 96, "n_ctx": 96, "n_inner": 52, "layer_norm_epsilon": 0.003}),
    "granite": ("Granite", _RMS | _GRANITE),
    "granitemoe": ("GraniteMoe", _RMS | _GRANITE | _LOCAL),
    "granitemoeshared": ("GraniteMoeShared", _RMS | _GRANITE | _LOCAL
                         | {"shared_intermediate_size": 44}),
    "granitehybrid": ("GraniteMoeHybrid", _RMS | _GRANITE | _MAMBA2 | {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 44,
        "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"}),
    "granitehybrid-attention": ("GraniteMoeHybrid", _RMS | _GRANITE | _MAMBA2 | {
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": FFN,
        "layer_types": ["attention"] * 3, "position_embedding_type": "rope"}),
    "granitehybrid-attention-moe": ("GraniteMoeHybrid", _RMS | _GRANITE | _MAMBA2 | _LOCAL | {
        "shared_intermediate_size": 44, "layer_types": ["attention"] * 3,
        "position_embedding_type": "rope"}),
    "granitehybrid-moe": ("GraniteMoeHybrid", _RMS | _GRANITE | _MAMBA2 | _LOCAL | {
        "shared_intermediate_size": 44, "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": None}),
    "hunyuan-dense": ("HunYuanDenseV1", _ODD),
    "lfm2": ("Lfm2", _PLAIN | {"norm_eps": 0.003, "conv_L_cache": 4, "conv_bias": False,
             "block_auto_adjust_ff_dim": False,
             "layer_types": ["conv", "full_attention", "conv"]}),
    "llama": ("Llama", _ODD),
    "llama3": ("Llama", _RMS | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5,
               "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}}),
    "llama-yarn": ("Llama", _RMS | _YARN),
    "llama-linear": ("Llama", _RMS | {"rope_parameters": {"rope_type": "linear", "factor": 3.0,
                                                          "rope_theta": 700.0}}),
    "llama4": ("Llama4", _ODD | _LOCAL | {"intermediate_size": 24, "intermediate_size_mlp": 56,
               "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "num_experts_per_tok": 1,
               "use_qk_norm": True, "attention_chunk_size": 8192, "floor_scale": 8192,
               "attn_scale": 0.1}),
    "mamba": ("Mamba", {"vocab_size": VOCABULARY, "hidden_size": H, "state_size": 6,
              "num_hidden_layers": LAYERS, "conv_kernel": 3, "time_step_rank": 5,
              "layer_norm_epsilon": 0.003, "intermediate_size": 80, "expand": 2}),
    "mamba2": ("Mamba2", {"vocab_size": VOCABULARY, "hidden_size": H, "state_size": 6,
               "num_hidden_layers": LAYERS, "conv_kernel": 3, "num_heads": 8, "head_dim": 10,
               "n_groups": 2, "layer_norm_epsilon": 0.003, "chunk_size": 8, "expand": 2}),
    "minimax-m2": ("MiniMaxM2", _ODD | _LOCAL | {"rotary_dim": 6, "intermediate_size": 24,
                   "rope_parameters": _PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.5}}),
    "ministral3": ("Ministral3", _ODD | {"rope_parameters": _YARN["rope_parameters"] | {
                   "llama_4_scaling_beta": 0.2, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "mistral": ("Mistral", _ODD | {"sliding_window": None}),
    "mixtral": ("Mixtral", _ODD | _LOCAL),
    "nemotron": ("Nemotron", _PLAIN | {"norm_eps": 0.003, "rope_parameters":
                 _PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.4}}),
    "olmo": ("Olmo", _PLAIN | {"clip_qkv": 0.4}),
    "olmo2": ("Olmo2", _RMS),
    "olmo3": ("Olmo3", _RMS | _WINDOW | {"num_hidden_layers": 4}),
    "olmoe": ("Olmoe", _RMS | {"rms_norm_eps": 1e-5, "num_experts": 6, "num_experts_per_tok": 2}),
    "phi2": ("Phi", _NORM | _TURNED | {"num_key_value_heads": HEADS,
             "intermediate_size": 4 * H}),
    "phi3": ("Phi3", _RMS | {"sliding_window": 5, "original_max_position_embeddings": 96,
             "rope_parameters": _PLAIN["rope_parameters"]
             | {"original_max_position_embeddings": 96}}),
    "phi3-long": ("Phi3", _RMS | {"sliding_window": None, "max_position_embeddings": 256,
             "original_max_position_embeddings": 16, "rope_parameters": {"rope_type": "longrope",
             "rope_theta": 700.0, "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0],
             "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "original_max_position_embeddings": 16}}),
    "phi4": ("Phi3", _RMS | {"sliding_window": None, "original_max_position_embeddings": 96,
             "rope_parameters": _PLAIN["rope_parameters"] | {"partial_rotary_factor": 0.8}}),
    "qwen2": ("Qwen2", _RMS),
    "qwen2-moe": ("Qwen2Moe", _RMS | _CHOSEN | {"shared_expert_intermediate_size": 44,
                  "norm_topk_prob": False}),
    "qwen2-vl": ("Qwen2VL", {"text_config": _RMS | {"rope_parameters": _PLAIN["rope_parameters"]
                 | {"mrope_section": [1, 2, 2]}}, "tie_word_embeddings": False, "vision_config":
                 {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": H}}),
    "qwen3-vl": ("Qwen3VL", {"text_config": _ODD | {"rope_parameters": _PLAIN["rope_parameters"]
                 | {"mrope_section": [2, 2, 2]}}, "tie_word_embeddings": False, "vision_config":
                 {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                  "out_hidden_size": H, "deepstack_visual_indexes": [0],
                  "num_position_embeddings": 16}}),
    "qwen3": ("Qwen3", _ODD),
    "qwen3-moe": ("Qwen3Moe", _ODD | _CHOSEN | {"norm_topk_prob": True}),
    "qwen3-next": ("Qwen3Next", _ODD | _HALF | _LINEAR | _CHOSEN | {"linear_value_head_dim": 16,
                   "shared_expert_intermediate_size": 44}),
    "qwen3_5": ("Qwen3_5", _ODD | _LINEAR | {"rope_parameters": {"rope_type": "default",
                "rope_theta": 700.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                "mrope_section": [1, 1, 1]}}),
    "qwen3_5-moe": ("Qwen3_5Moe", _ODD | _LINEAR | _CHOSEN | {"shared_expert_intermediate_size": 44,
                "rope_parameters": {"rope_type": "default", "rope_theta": 700.0,
                "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                "mrope_section": [1, 1, 1]}}),
    "solar-open": ("SolarOpen", _ODD | _ROUTED | {"first_k_dense_replace": 0, "rope_parameters":
                   _PLAIN["rope_parameters"] | {"partial_rotary_factor": 1.0}}),
    "seed-oss": ("SeedOss", _ODD | {"attention_bias": True}),
    "smollm3": ("SmolLM3", _RMS | {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "stablelm": ("StableLm", _NORM | _TURNED | {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", _NORM | _TURNED | {"use_parallel_residual": True}),
    "t5": ("T5", _T5 | {"feed_forward_proj": "relu"}),
    "t5-gated": ("T5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "t5-encoder": ("T5Encoder", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "t5-unscaled": ("T5", _T5 | {"feed_forward_proj": "relu", "tie_word_embeddings": False}),
    "t5-untied": ("T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "starcoder2": ("Starcoder2", _PLAIN | {"norm_epsilon": 0.003, "sliding_window": None}),
}
_BIASES = dict.fromkeys(
    ("attention_bias", "attention_out_bias", "mlp_bias", "projectors_bias", "use_bias"), True
)
_BIASED = ("cohere", "deepseek-v3", "dots1", "falcon-h1-plain", "gemma2", "granitehybrid", "llama",
           "mamba", "qwen3-moe", "qwen3_5", "seed-oss")
CASES |= {f"{c}-biased": (CASES[c][0], CASES[c][1] | _BIASES) for c in _BIASED}
CASES["falcon-h1-plain-biased"][1]["attention_bias"] = False  # which are refused
# Classes without a head: {case of the one with it: the class}.
_HEADLESS = {
    **{"bloom": "BloomModel", "lfm2": "Lfm2Model", "llama": "LlamaModel"},
    **{"qwen2": "Qwen2Model", "qwen2-vl": "Qwen2VLModel", "qwen3": "Qwen3Model"},
}
CASES |= {f"{case}-model": (name, CASES[case][1]) for case, name in _HEADLESS.items()}

_GLM = {"hidden_size": 48, "attention_bias": True}
_SECTIONS = {"rope_parameters": _HALF["rope_parameters"] | {"mrope_section": [1, 1, 1]}}
_UNIFIED = {key: value for key, value in _GEMMA4.items() if "per_layer" not in key}
# Classes that see or hear: (the class, its text's model, its text's values).
_BESIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "audioflamingo3": ("AudioFlamingo3", "qwen2", _RMS),
    "exaone4_5": ("Exaone4_5_", "exaone4", CASES["exaone4"][1]),
    "gemma3-seeing": ("Gemma3", "gemma3_text", CASES["gemma3"][1]),
    "gemma4-seeing": ("Gemma4", "gemma4_text", CASES["gemma4"][1] | {"pad_token_id": 0}),
    "gemma4-unified": ("Gemma4Unified", "gemma4_unified_text", _UNIFIED | {"pad_token_id": 0,
                       "moe_intermediate_size": None, "num_experts": None,
                       "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "glm4v": ("Glm4v", "glm4v_text", _RMS | _SECTIONS | _GLM),
    "glm4v-moe": ("Glm4vMoe", "glm4v_moe_text", CASES["glm4-moe"][1] | _SECTIONS),
    "glm-ocr": ("GlmOcr", "glm_ocr_text", _ODD | _SECTIONS),
    "janus": ("Janus", "llama", _RMS),
    "llava": ("Llava", "mistral", _ODD | {"sliding_window": None}),
    "minicpmv4_6": ("MiniCPMV4_6", "qwen3_5_text", CASES["qwen3_5"][1]),
    "mistral3": ("Mistral3", "mistral", _ODD | {"sliding_window": None}),
    "mistral3-scaled": ("Mistral3", "ministral3", CASES["ministral3"][1]),
    "qwen2-audio": ("Qwen2Audio", "qwen2", _RMS),
    "qwen2_5-vl": ("Qwen2_5_VL", "qwen2_5_vl_text", CASES["qwen2-vl"][1]["text_config"]),
    "qwen3-asr": ("Qwen3ASR", "qwen3", _ODD),
    "qwen3_5-seeing": ("Qwen3_5", "qwen3_5_text", CASES["qwen3_5"][1]),
    "qwen3_5-moe-seeing": ("Qwen3_5Moe", "qwen3_5_moe_text", CASES["qwen3_5-moe"][1]),
    "voxtral": ("Voxtral", "llama", _ODD),
}
_EYE = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "d_model", "encoder_ffn_dim"), 16),
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "encoder_attention_heads"), 2),
    **{"out_hidden_size": H, "output_dim": H, "num_position_embeddings": 16},
    **{"num_key_value_heads": 2, "head_dim": 8, "image_size": 8, "patch_size": 4},
}
CASES |= {
    case: (name, {"text_config": values | {"model_type": kind}, "vision_config": _EYE,
                  "audio_config": _EYE, "tie_word_embeddings": values["tie_word_embeddings"]})
    for case, (name, kind, values) in _BESIDE.items()
}
# Which has a network for images, too, of millions of weights.
CASES["janus"][1]["vision_config"] = _EYE | {"projection_dim": 16}
CASES["janus"][1]["vq_config"] = {"projection_dim": 16, "image_token_embed_dim": 16,
                                  "num_embeddings": 16, "base_channels": 32, "num_res_blocks": 1,
                                  "channel_multiplier": [1, 1], "latent_channels": 32}
# What becomes of files of classes: of those with a case, of an architecture without a row, else.
WITHIN, REFUSED = "logits within 1e-5 of transformers'", "refused by the name of their architecture"
_UNCONVERTED = "listed by the converter, which makes no file of them"
OTHERS = {
    "BambaForCausalLM": "refused, as the file has none of Granite's scales",
    "Glm4MoeLiteForCausalLM": "refused, as the file does not say how its experts are scored",
    "GraniteSpeechForConditionalGeneration": _UNCONVERTED,
    "GraniteSpeechPlusForConditionalGeneration": _UNCONVERTED,
    "Llama4ForConditionalGeneration": "whose text has a case, and which take no text alone",
    "UMT5Model": "whose files are those of another class",
    "YoutuForCausalLM": "refused, as the file has no experts",
}
# Values that move logits, and of which the converter writes nothing: what files of a case are read
# as. Found by converting each case with each value of its config changed.
_NO_WINDOW, _NO_WINDOWS = {"sliding_window": None}, {"use_sliding_window": False}
_DISTANCE = {"relative_attention_max_distance": 128}
_STEPS = {"time_step_limit": [0.0, float("inf")]}
_THETA = {"rope_parameters.rope_theta": 10000.0}
UNSAID: dict[str, dict[str, Any]] = {
    "bloom": {"apply_residual_connection_post_layernorm": False},
    "deepseek-v3": {"rope_interleave": True},
    "falcon": _THETA | {"alibi": False},
    "falcon-h1": _STEPS | {"mamba_norm_before_gate": False},
    "falcon-mamba": {"mixer_rms_eps": 1e-6},
    "gemma": _THETA | {"use_bidirectional_attention": None},
    "gemma2": _THETA,
    "gpt-oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_parameters.truncate": False},
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    "granitehybrid": _STEPS | {"position_embedding_type": "nope"},
    "llama4": {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
    "mamba2": _STEPS,
    "ministral3": _NO_WINDOW | {"rope_parameters.mscale": 1.0},
    "olmoe": {"rms_norm_eps": 1e-5, "clip_qkv": None, "norm_topk_prob": False},
    "phi2": _THETA,
    "qwen2-moe": _NO_WINDOWS | {"norm_topk_prob": False},
    "qwen3-moe": _NO_WINDOWS | {"norm_topk_prob": True},
    "stablelm": _THETA,
    **dict.fromkeys(("mistral", "mixtral", "starcoder2"), _NO_WINDOW),
    "qwen3-next": {"norm_topk_prob": True},
    **dict.fromkeys(("qwen2", "qwen3"), _NO_WINDOWS),
    **dict.fromkeys(("mt5", "t5", "t5-encoder", "umt5"), _DISTANCE),
}
# fmt: on

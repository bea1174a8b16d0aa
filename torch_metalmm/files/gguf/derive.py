"""Attributes of a config that a file implies without a key for them, by llama.cpp's rules.

Each rule takes the values read so far and the file; rows.py says which attribute it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .file import GgufFile

Rule = Callable[[dict[str, Any], GgufFile], Any]

XIELU = ("alpha_p", "alpha_n", "beta", "eps")
FALCON_H1 = (
    *("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"),
)
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the models of 27 B
ROPE_DIVISORS = "rope_freqs.weight"  # one for each frequency
_PER_LAYER = "per_layer_token_embd.weight"
_PATTERN = "attention.sliding_window_pattern"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ATTENDING = ("attention", _FULL)  # in the words of Granite's configs, and of transformers
_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def head_dim(values: dict[str, Any], file: GgufFile) -> int:
    """attention.key_length, or what the heads have of the width."""
    given = file.stated("attention.key_length")
    if given is None:
        given = file.stated("embedding_length") // file.stated("attention.head_count")
    return int(given)


def gemma_scale(values: dict[str, Any], file: GgufFile) -> int:
    return attention_scalar(
        file.architecture,
        values["num_hidden_layers"],
        values["hidden_size"],
        values["num_attention_heads"],
        values["head_dim"],
    )


def attention_scalar(architecture: str, layers: int, width: int, heads: int, head: int) -> int:
    """query_pre_attn_scalar of Gemma: the width of a head, and width / heads in models of 27 B.

    No key says it; llama.cpp knows these models by their number of layers.
    """
    return width // heads if layers == _LARGEST.get(architecture) else head


def windows(values: dict[str, Any], file: GgufFile, every: int = 4) -> list[str]:
    """layer_types by the file's pattern, True of a window; else 1 layer of `every` has none."""
    layers = range(values["num_hidden_layers"])
    if not values["sliding_window"]:
        return [_FULL for _ in layers]
    pattern = file.stated(_PATTERN, every)
    if isinstance(pattern, list):
        if len(pattern) != len(layers):
            raise ValueError(f"{file.path}: {_PATTERN} has {len(pattern)} elements")
        return [_SLIDING if window else _FULL for window in pattern]
    return [_SLIDING if (layer + 1) % pattern else _FULL for layer in layers]


def gemma3_windows(values: dict[str, Any], file: GgufFile) -> list[str]:
    return windows(values, file, 6)


def gemma3_rotations(values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """One rotation of layers with a window, which is never scaled, and one of the others."""
    sliding = {"rope_type": "default", "rope_theta": file.stated("rope.freq_base_swa", 10000.0)}
    return {_FULL: values["rope_parameters"], _SLIDING: sliding}


def gemma4_rotations(values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """One rotation of layers with a window; the others turn the first frequencies, divided by 1.

    The file divides what stays by 1e30. ValueError: other divisors, or none.
    """
    entry = file.tensors.get(ROPE_DIVISORS)
    given = [] if entry is None else file.dense(ROPE_DIVISORS).flatten().tolist()
    turned = given.count(1.0)
    if not given or given[:turned].count(1.0) < turned or any(d < 1e20 for d in given[turned:]):
        raise ValueError(
            f"{file.path}: {ROPE_DIVISORS} is {given[:4]}...; it must be ones, then at least 1e20"
        )
    full = {"rope_type": "proportional", "partial_rotary_factor": turned / len(given)}
    full["rope_theta"] = file.stated("rope.freq_base", 10000.0)
    sliding = {"rope_type": "default", "rope_theta": file.stated("rope.freq_base_swa", 10000.0)}
    return {_FULL: full, _SLIDING: sliding}


def _of_kind(values: dict[str, Any], file: GgufFile, key: str, kind: str) -> Any:
    """The number of the first layer of that kind; of the first, if there is none."""
    kinds = values["layer_types"]
    return _each(values, file, key)[kinds.index(kind) if kind in kinds else 0]


# Read from lists of a number for each layer, and from tensors: layers that share keys may be twice
# as wide, layers without a window have another count of keys, and take keys as values.
GEMMA4: dict[str, Rule] = {
    "layer_types": windows,
    "global_head_dim": head_dim,
    "head_dim": lambda v, f: f.stated("attention.key_length_swa", v["head_dim"]),
    "rope_parameters": gemma4_rotations,
    "intermediate_size": lambda v, f: _each(v, f, "feed_forward_length")[0],
    "use_double_wide_mlp": lambda v, f: len(set(_each(v, f, "feed_forward_length"))) > 1,
    "num_key_value_heads": lambda v, f: _of_kind(v, f, "attention.head_count_kv", _SLIDING),
    "num_global_key_value_heads": lambda v, f: _of_kind(v, f, "attention.head_count_kv", _FULL),
    "attention_k_eq_v": lambda v, f: any(
        f"blk.{layer}.attn_k.weight" in f.tensors and f"blk.{layer}.attn_v.weight" not in f.tensors
        for layer in range(v["num_hidden_layers"])
    ),
    "vocab_size_per_layer_input": lambda v, f: (
        f.tensors[_PER_LAYER].shape[0] if _PER_LAYER in f.tensors else 262144
    ),
}


def phi3_context(values: dict[str, Any], file: GgufFile) -> int:
    given = file.stated("rope.scaling.original_context_length")
    return int(values["max_position_embeddings"] if given is None else given)


def phi3_rotation(values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """longrope, if the file has its factors of long and of short texts."""
    rope: dict[str, Any] = values["rope_parameters"]
    if not all(tensor in file.tensors for tensor in _FACTORS.values()):
        return rope
    factors = {name: file.dense(tensor).flatten().tolist() for name, tensor in _FACTORS.items()}
    rope = rope | factors | {"rope_type": "longrope"}
    rope["original_max_position_embeddings"] = phi3_context(values, file)
    attention = file.stated("rope.scaling.attn_factor")
    return rope if attention is None else rope | {"attention_factor": attention}


def most_kv_heads(values: dict[str, Any], file: GgufFile) -> int:
    """The kv_heads of layers with attention: one count for each layer says 0 of the others."""
    if file.stated("attention.head_count_kv") is None:
        return int(values["num_attention_heads"])
    return max(_each(values, file, "attention.head_count_kv"))


def granite_layers(values: dict[str, Any], file: GgufFile) -> list[str]:
    heads = _each(values, file, "attention.head_count_kv")
    return ["attention" if count else "mamba" for count in heads]


def granite_kv_heads(config: Any) -> list[int]:
    """kv_heads by layer. ValueError: no layer has a state; such models' files have other names."""
    heads = [config.num_key_value_heads * (kind in _ATTENDING) for kind in config.layer_types]
    if all(heads):
        raise ValueError(
            f"model: layer_types {config.layer_types}; allowed in files of granitehybrid: some "
            "with a state"
        )
    return heads


def granite_rotation(values: dict[str, Any], file: GgufFile) -> str:
    return "rope" if file.stated("rope.scaling.finetuned", True) else "nope"


def lfm2_layers(values: dict[str, Any], file: GgufFile) -> list[str]:
    heads = _each(values, file, "attention.head_count_kv")
    return [_FULL if count else "conv" for count in heads]


def lfm2_width(config: Any) -> int:
    """The width of the MLP, as transformers' Lfm2MLP makes it from the config's."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return width


def lfm2_bias(config: Any) -> bool:
    """ValueError: the convolutions have biases, which readers of a file do not look for."""
    if config.conv_bias:
        raise ValueError("model: GGUF files have no biases of LFM2's convolutions (conv_bias)")
    return False


def lfm2_kv_heads(config: Any) -> list[int]:
    """The counts that lfm2_layers reads."""
    return [config.num_key_value_heads * (kind == _FULL) for kind in config.layer_types]


def qwen35_layers(values: dict[str, Any], file: GgufFile) -> list[str]:
    every = file.stated("full_attention_interval", 4)
    linear = file.stated("attention.recurrent_layers")
    if linear is None:
        linear = [(layer + 1) % every != 0 for layer in range(values["num_hidden_layers"])]
    layers = linear[: values["num_hidden_layers"]]
    return ["linear_attention" if recurrent else _FULL for recurrent in layers]


def qwen35_recurrent(config: Any) -> list[bool]:
    """The flags of layers that qwen35_layers reads."""
    return [kind != _FULL for kind in config.layer_types]


def full_attention_interval(config: Any) -> int | None:
    """qwen35_recurrent as one number; None: no number makes the config's layers."""
    recurrent = qwen35_recurrent(config)
    every = (recurrent.index(False) if False in recurrent else len(recurrent)) + 1
    made = [(layer + 1) % every != 0 for layer in range(len(recurrent))]
    return every if made == recurrent else None


def rows_of_values(config: Any) -> int:
    """Rows of the projection that makes the values of a linear layer; its gate has as many."""
    return int(config.linear_num_value_heads * config.linear_value_head_dim)


def rows_of_convolution(config: Any) -> int:
    """Rows of the projections that make queries, keys and values of a linear layer."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return int(2 * keys + rows_of_values(config))


def rows_of_shared(config: Any) -> int:
    """Rows of the gate of Granite's shared expert; its up has as many."""
    return int(config.shared_intermediate_size)


def qwen35_sections(config: Any) -> dict[str, Any]:
    """rope_parameters with what the model takes where they have none."""
    own = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    return own | config.rope_parameters


def qwen35_rotation(values: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """One section for each axis, padded to four."""
    sections = [section for section in file.stated("rope.dimension_sections") if section]
    rope: dict[str, Any] = values["rope_parameters"]
    return rope | {"mrope_section": sections, "mrope_interleaved": True}


def ssm_head(values: dict[str, Any], file: GgufFile) -> int:
    return int(file.stated("ssm.inner_size") // file.stated("ssm.time_step_rank"))


def ssm_expand(values: dict[str, Any], file: GgufFile) -> int:
    return int(file.stated("ssm.inner_size") // values["hidden_size"])


def feed_forward(values: dict[str, Any], file: GgufFile) -> int:
    """The rows of ffn_up: the converter of these models states 4 times the hidden size, always."""
    entry = file.tensors.get("blk.0.ffn_up.weight")
    return entry.shape[0] if entry is not None else int(file.stated("feed_forward_length"))


def t5_activation(values: dict[str, Any], file: GgufFile) -> str:
    return "gated-gelu" if any(".ffn_gate." in name for name in file.tensors) else "relu"


def deepseek_choice(values: dict[str, Any], file: GgufFile) -> str:
    return "group_limited_greedy" if values["n_group"] > 1 else "greedy"


def scoring(values: dict[str, Any], file: GgufFile) -> str:
    gating = file.stated("expert_gating_func", 2)
    return {0: "none", 2: "sigmoid"}.get(gating, "softmax")


def _each(values: dict[str, Any], file: GgufFile, key: str) -> list[int]:
    """The numbers of every layer, of which the file states one for all, or a list."""
    given = file.stated(key)
    count = values["num_hidden_layers"]
    if isinstance(given, list) and len(given) != count:
        raise ValueError(f"{file.path}: {key} has {len(given)} elements; allowed: {count}")
    return given if isinstance(given, list) else [given] * count

"""Qwen3-Next: a matrix of the model that files have as two, in another order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from expert_models import check_equals
from gguf_files import ARCHITECTURES, load_quietly, random_model, tensors_of, write_gguf
from inputs import random_weight
from test_gguf_save import check_same_file, check_same_model
from torch import Tensor

from torch_metalmm import QuantLinear, save_gguf

VALUES = ARCHITECTURES["qwen3next"]
KEY_HEADS, HEADS = VALUES["ssm.group_count"], VALUES["ssm.time_step_rank"]
SIZE = VALUES["ssm.state_size"]
KEYS, ALL = KEY_HEADS * SIZE, HEADS * SIZE
_LAYER = {
    **{f"attn_{p}.weight": f"self_attn.{p}_proj.weight" for p in "qkv"},
    **{f"attn_{p}_norm.weight": f"self_attn.{p}_norm.weight" for p in "qk"},
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    **{
        f"ffn_{p}_shexp.weight": f"mlp.shared_expert.{p}_proj.weight"
        for p in ("gate", "up", "down")
    },
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def file_of(path: Path, qkv: str, others: str) -> Path:
    """Its matrices in the format `others`, but attn_qkv, in `qkv`."""
    tensors = dict(tensors_of(random_model(path, "qwen3next", kinds=(others,))))
    for name in [n for n in tensors if n.endswith("attn_qkv.weight") and qkv != others]:
        weight = random_weight(qkv, 2 * KEYS + ALL, VALUES["embedding_length"], seed=name)
        tensors[name] = weight.numpy(), qkv
    return write_gguf(path, "qwen3next", tensors, VALUES)


def with_one_matrix(path: Path) -> Path:
    """The file as those of 2025: queries, keys, values and gates in one, by head of keys."""
    tensors = dict(tensors_of(path))
    for name in [n for n in tensors if n.endswith("attn_qkv.weight")]:
        prefix = name.removesuffix("attn_qkv.weight")
        (qkv, format), (gate, _) = tensors.pop(name), tensors.pop(f"{prefix}attn_gate.weight")
        tensors[f"{prefix}ssm_in.weight"] = by_key_head(qkv, gate), format
    return write_gguf(path.with_name("one.gguf"), "qwen3next", tensors, VALUES)


def by_key_head(qkv: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """The model's rows: of each head of keys q, k, then v and the gates of its heads of values."""
    q, k, v = qkv[:KEYS], qkv[KEYS : 2 * KEYS], qkv[2 * KEYS :]
    each, rows = ALL // KEY_HEADS, list[np.ndarray]()
    for head in range(KEY_HEADS):
        own, values = slice(head * SIZE, (head + 1) * SIZE), slice(head * each, (head + 1) * each)
        rows += [q[own], k[own], v[values], gate[values]]
    return np.concatenate(rows)


def reference(path: Path) -> Any:
    """transformers' model of the weights that the gguf package decodes."""
    config = transformers.Qwen3NextConfig(
        vocab_size=320,
        hidden_size=VALUES["embedding_length"],
        intermediate_size=VALUES["feed_forward_length"],
        num_hidden_layers=VALUES["block_count"],
        num_attention_heads=VALUES["attention.head_count"],
        num_key_value_heads=VALUES["attention.head_count_kv"],
        head_dim=VALUES["attention.key_length"],
        max_position_embeddings=VALUES["context_length"],
        rms_norm_eps=VALUES["attention.layer_norm_rms_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": VALUES["rope.freq_base"],
            "partial_rotary_factor": VALUES["rope.dimension_count"]
            / VALUES["attention.key_length"],
        },
        linear_conv_kernel_dim=VALUES["ssm.conv_kernel"],
        linear_key_head_dim=SIZE,
        linear_value_head_dim=SIZE,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        num_experts=VALUES["expert_count"],
        num_experts_per_tok=VALUES["expert_used_count"],
        moe_intermediate_size=VALUES["expert_feed_forward_length"],
        shared_expert_intermediate_size=VALUES["expert_shared_feed_forward_length"],
        tie_word_embeddings=True,
    )
    config._experts_implementation = "eager"
    model = transformers.Qwen3NextForCausalLM._from_config(config, dtype=torch.float32)
    given = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    state = {ours: torch.from_numpy(given.pop(theirs).copy()) for theirs, ours in _WHOLE.items()}
    for layer in range(VALUES["block_count"]):
        theirs, ours = f"blk.{layer}.", f"model.layers.{layer}."
        own = {n.removeprefix(theirs): given.pop(n) for n in list(given) if n.startswith(theirs)}
        if "attn_gate.weight" in own:
            joined = by_key_head(own.pop("attn_qkv.weight"), own.pop("attn_gate.weight"))
            state[f"{ours}linear_attn.in_proj_qkvz.weight"] = torch.from_numpy(joined)
        pair = own.pop("ffn_gate_exps.weight"), own.pop("ffn_up_exps.weight")
        state[f"{ours}mlp.experts.gate_up_proj"] = torch.from_numpy(np.concatenate(pair, 1))
        for leaf, value in own.items():
            state[ours + _LAYER[leaf]] = torch.from_numpy(value.copy())
    assert not given
    for name, value in state.items():
        if name.endswith("A_log"):
            state[name] = torch.log(-value)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            state[name] = value - 1
        elif name.endswith("conv1d.weight"):
            state[name] = value[:, None]
        elif name.endswith("shared_expert_gate.weight"):
            state[name] = value.reshape(1, -1)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval()


# (format of attn_qkv, of the others, of the matrix of both)
FORMATS = [
    *((f, f, f) for f in ("q8_0", "q4_k", "iq4_xs", "f16")),
    ("q5_k", "q4_k", "q5_k"),
    ("q4_k", "q5_k", "q5_k"),
    ("q6_k", "q5_k", "q8_0"),
]


@pytest.mark.parametrize(("qkv", "others", "both"), FORMATS)
def test_a_file_equals_transformers(qkv: str, others: str, both: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.gguf", qkv, others)
    model, tokenizer, warned = load_quietly(path)
    is_new = both not in (qkv, others)
    assert len(warned) == is_new and all("packed again in q8_0" in text for text in warned)
    wanted = reference(path)
    for ours, theirs in zip(model.model.layers[:3], wanted.model.layers, strict=False):
        layer, dense = ours.linear_attn.in_proj_qkvz, theirs.linear_attn.in_proj_qkvz.weight
        assert isinstance(layer, QuantLinear) and layer.format == both
        if is_new:  # half a code of the block's largest value, and that scale as f16
            most = dense.view(len(dense), -1, 32).abs().amax(-1, keepdim=True)
            off = (layer.dequantize() - dense).view(len(dense), -1, 32).abs()
            assert (off <= most * (0.5 / 127 + 2**-11)).all() and off.any()
            dense.data.copy_(layer.dequantize())
        assert torch.equal(layer.dequantize(), dense)
    ids = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(1))
    check_equals(model, wanted, ids)
    save_gguf(model, tokenizer, tmp_path / "b.gguf")
    if qkv == others:
        check_same_file(tmp_path / "b.gguf", path)
    check_same_model(tmp_path / "b.gguf", model, tokenizer)


def test_a_file_of_one_matrix(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.gguf", "q4_k", "q4_k")
    (two, _, _), (one, _, warned) = load_quietly(path), load_quietly(with_one_matrix(path))
    states: list[dict[str, Tensor]] = [model.state_dict() for model in (two, one)]
    assert not warned and states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_parts_of_other_sizes_are_refused(tmp_path: Path) -> None:
    """Also where the rows of both are as many as the model's."""
    path = file_of(tmp_path / "a.gguf", "q8_0", "q8_0")
    tensors = dict(tensors_of(path))
    qkv, gate = (tensors[f"blk.0.attn_{part}.weight"][0] for part in ("qkv", "gate"))
    moved = {"qkv": qkv[:-SIZE], "gate": np.concatenate([qkv[-SIZE:], gate])}
    own = {f"blk.0.attn_{part}.weight": (rows, "q8_0") for part, rows in moved.items()}
    shapes = rf"_qkv.weight' is \[{2 * KEYS + ALL - SIZE}, .*_gate.weight' is \[{ALL + SIZE},"
    one = {"blk.0.ssm_in.weight": (by_key_head(qkv, gate), "q8_0")}
    for change, text in ((own, shapes), (one, "'blk.0.ssm_in.weight' alone makes the model's")):
        bad = write_gguf(tmp_path / "bad.gguf", "qwen3next", tensors | change, VALUES)
        with pytest.raises(ValueError, match=text):
            load_quietly(bad)

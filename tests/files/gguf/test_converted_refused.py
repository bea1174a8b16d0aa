"""Recorded files that contradict themselves, or that no model is known for: what load_gguf says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converted_cases import FFN, HEAD, HEADS, H
from converted_models import Tensors, write_record

from torch_metalmm import load_gguf

Change = Callable[[Tensors], object]
GATE, UP, DOWN = (f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
ROUTER = "blk.1.ffn_gate_inp.weight"
KEYS, VALUES, BOTH = (f"blk.2.attn_{part}_b.weight" for part in ("k", "v", "kv"))


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def cut(name: str, part: Any) -> Change:
    def change(tensors: Tensors) -> None:
        data, format = tensors[name]
        tensors[name] = np.ascontiguousarray(data[part]), format

    return change


def with_ones(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: (np.ones(shape, np.float32), "f32")})


def both_layouts(tensors: Tensors) -> None:
    with_ones(BOTH, 96, 16)(tensors)


def one_stack_and_both(tensors: Tensors) -> None:
    both_layouts(tensors)
    del tensors[KEYS]


def one_by_one(tensors: Tensors) -> None:
    for name in [n for n in tensors if "_exps" in n]:
        data, format = tensors.pop(name)
        for i, expert in enumerate(data):
            tensors[name.replace("_exps", f".{i}")] = expert, format


def of_values(*rows: tuple[str, Any, str]) -> list[tuple[None, dict[str, Any], str]]:
    """(key, value, message) as rows of REFUSED; None leaves the key out."""
    return [(None, {key: value}, message) for key, value, message in rows]


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
LOG = "rope.scaling.yarn_log_multiplier"
INV_FREQ = r"buffer .*inv_freq alone is \[1073741824\], 4294967296"
GROUPS = "allowed: 0 and divisors of expert_count, 6, that leave 2 or more experts in each group"
ALONE = rf"'{BOTH}' alone makes the model's model.layers.2.self_attn.kv_b_proj.weight, for which"
# {case of the record: (a change of its tensors, its values, the message)}
REFUSED: dict[str, list[tuple[Change | None, dict[str, Any], str]]] = {
    "qwen3-moe": [
        (without(UP), {}, f"no tensor {UP}, for the model's model.layers.1.mlp.experts of 6"),
        (without(DOWN), {}, f"no tensor {DOWN}, for the model's"),
        (cut(GATE, slice(0, 5)), {}, rf"tensor '{GATE}' is \[5, 24, 40\], but .*\[6, 24, 40\]"),
        (cut(UP, np.s_[:, :23]), {}, rf"tensor '{UP}' is \[6, 23, 40\], but the model's"),
        (cut(DOWN, 0), {}, rf"tensor '{DOWN}' is \[40, 24\], but the model's"),
        (with_ones(ROUTER, 8, H), {}, rf"'{ROUTER}' is \[8, 40\], but the model's"),
        (one_by_one, {}, r"has its experts one by one \(blk.0.ffn_down.0.weight\)"),
        *of_values(
            ("expert_count", 9, r"ffn_\w+_exps.weight' is \[6, 24, 40\], but .*\[9, 24, 40\]"),
            ("expert_feed_forward_length", 48, r"is \[6, 24, 40\], but .*\[6, 48, 40\]"),
            ("expert_count", 0, "qwen3moe.expert_count = 0; allowed: integers from 1 on"),
            ("expert_used_count", 0, "expert_used_count = 0; allowed: integers from 1 to 6"),
            ("expert_used_count", 9, "expert_used_count = 9; allowed: integers from 1 to 6"),
        ),
        *of_values(
            *(
                ("nextn_predict_layers", n, f"_layers = {n!r}; allowed: integers from 0 to 2")
                for n in (3, 4, 1.0, True, "1")
            )
        ),
    ],
    "llama": [
        *(
            (
                with_ones(name, *shape),
                {},
                f"'{name}' is {re.escape(str([*shape]))}, but the model's",
            )
            for name, shape in (
                ("output_norm.weight", (H, 1)),
                ("output_norm.weight", (1, H)),
                ("blk.1.attn_norm.weight", (2, H // 2)),
                ("blk.0.attn_output.weight", (H, 1, HEADS * HEAD)),
                ("blk.0.ffn_up.weight", (H, FFN)),
            )
        ),
        *of_values(
            ("block_count", 2**31, "block_count = 2147483648, but it has 30 tensors"),
            ("block_count", 4, "no tensor for the model's model.layers.3"),
            ("block_count", "text", "block_count = 'text', but it has 30 tensors"),
            ("embedding_length", 2**31, "embedding_length = 2147483648, but token_embd.weight is"),
            ("embedding_length", "text", "embedding_length = text, but token_embd.weight is"),
            ("embedding_length", None, "llama.embedding_length is missing, or a list"),
            ("feed_forward_length", 99, r"is \[40, 56\], but the model's .* is \[40, 99\]"),
            ("attention.head_count", 0, "head_count = 0; allowed: integers from 1 to 40"),
            ("attention.head_count", 2**30, "1073741824; allowed: integers from 1 to 40"),
            ("attention.layer_norm_rms_epsilon", "text", "no config of its metadata|no model fits"),
        ),
    ],
    "qwen2": [(with_ones("blk.1.attn_q.bias", H, 1), {}, r"attn_q.bias' is \[40, 1\], but")],
    "gpt2": [
        (with_ones("blk.0.ffn_down.weight", 52, H), {}, r"\[52, 40\], which makes \[40, 52\], but")
    ],
    "mamba": [
        (with_ones("blk.0.ssm_conv1d.weight", 3, 80), {}, r"3, 80\], which makes \[3, 1, 80\], but")
    ],
    "qwen3_5": of_values(("rope.dimension_count", 2**31, INV_FREQ)),
    "qwen3_5-moe": [(without(UP), {}, f"no tensor {UP}, for the model's .*experts of 6 experts")],
    "granitemoe": of_values(  # whose files with a shared expert have the name of those without
        ("expert_shared_feed_forward_length", 2, "no tensor for the model's .*shared_mlp"),
        ("expert_shared_count", 2, "granitemoe.expert_shared_count is known for other archit"),
    ),
    "glm4-moe": of_values(
        ("expert_gating_func", 1, "glm4moe.expert_gating_func is 1; it must be 2")
    ),
    "deepseek-v3": [
        (without(VALUES), {}, f"'{KEYS}' is .*, which makes nothing, but"),
        (both_layouts, {}, rf"{ALONE} the file has '{KEYS}', '{VALUES}' too"),
        (one_stack_and_both, {}, rf"{ALONE} the file has '{VALUES}' too"),
        (None, YARN | {LOG: 0.0}, "multiplier is 0.0, .* is 'yarn'; without"),
        (None, YARN, "multiplier is None, .* is 'yarn'; without"),
        *of_values(
            ("attention.kv_lora_rank", 0, "attention.kv_lora_rank = 0; allowed: integers from 1"),
            ("attention.key_length_mla", 0, "key_length_mla = 0; allowed: integers from 1 on"),
            ("attention.value_length_mla", 0, "value_length_mla = 0; allowed: integers from 1 on"),
            ("attention.kv_lora_rank", None, "kv_lora_rank = None; allowed: integers from 1 on"),
            ("attention.kv_lora_rank", "x", "kv_lora_rank = 'x'; allowed: integers from 1 on"),
            ("attention.kv_lora_rank", 8, r"is \[16\], but the model's .* is \[8\]"),
            ("rope.dimension_count", 16, "_mla is 16; it must be more than .*count, 16"),
            ("attention.value_length_mla", 8, r"attn_k_b.* and .*_v_b.*, which makes \[96, 16\]"),
            ("attention.q_lora_rank", 0, "no tensor for the model's model.*0.self_attn.q_proj.w"),
            ("attention.temperature_scale", 0.1, "temperature_scale is .*; it must be 0"),
            ("expert_gating_func", 1, "func is 1, but blk.1.exp_probs_b.bias cor.* has 2"),
            ("expert_gating_func", None, "func is missing, but blk.1.exp_probs_b.bias corrects"),
            ("expert_group_count", 4, f"group_count = 4; {GROUPS}"),
            ("expert_group_count", 6, f"group_count = 6; {GROUPS}"),
            ("expert_group_count", 2.0, "group_count = 2.0; allowed: integers from 0 on"),
            ("expert_group_used_count", 0, "used_count = 0; allowed: integers from 1 to 2"),
            ("expert_group_used_count", 9, "used_count = 9; allowed: integers from 1 to 2"),
            ("expert_weights_scale", float("inf"), "weights_scale = inf; allowed: finite numbers"),
            ("expert_weights_scale", "x", "weights_scale = 'x'; allowed: finite numbers"),
        ),
    ],
    "granite": of_values(
        ("logit_scale", None, "granite.logit_scale is missing"),
        ("embedding_scale", None, "granite.embedding_scale is missing"),
        ("block_count", None, "granite.block_count is missing"),
        ("attention.head_count", None, "granite.attention.head_count = None; allowed"),
        ("attention.head_count_kv", [2, 2], "has 2 elements"),
        ("expert_count", 4, "granite.expert_count is known for other architectures only"),
        ("attention.sliding_window", 4, "granite.attention.sliding_window is known for"),
        ("rope.dimension_count", "x", "no config of its metadata"),
        ("rope.scaling.finetuned", False, "rope.scaling.finetuned is False; it must be True"),
    ),
    "olmo": [(with_ones("blk.1.attn_k.bias", 20), {}, "blk.1.attn_k.bias: .* writes another bias")],
    "falcon-h1-plain": [
        (with_ones("blk.1.attn_v.bias", HEADS * HEAD), {}, "attn_v.bias: .* writes another bias")
    ],
}


@pytest.mark.parametrize(
    ("case", "change", "values", "message"),
    [(case, *row) for case, rows in REFUSED.items() for row in rows],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    change: Change | None,
    values: dict[str, Any],
    message: str,
) -> None:
    """Before a tokenizer is made, which takes longer than the rest."""
    path = write_record(tmp_path / "bad.gguf", case, change or len, **values)
    monkeypatch.setattr("torch_metalmm.files.gguf.load.tokenizer", pytest.fail)
    with pytest.raises(ValueError, match=message) as caught:
        load_gguf(path)
    assert str(path) in str(caught.value)

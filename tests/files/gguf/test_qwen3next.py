"""Qwen3-Next: a matrix of the model that files have as two, in another order of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, decoded, load_quietly, random_model, tensors_of, write_gguf
from inputs import random_weight
from test_gguf_save import check_same_file, check_same_model
from torch import Tensor

from bench.models.llamas import dense_state
from torch_metalmm import QuantLinear, save_gguf

VALUES = ARCHITECTURES["qwen3next"]
KEY_HEADS, HEADS = VALUES["ssm.group_count"], VALUES["ssm.time_step_rank"]
SIZE = VALUES["ssm.state_size"]
KEYS, ALL = KEY_HEADS * SIZE, HEADS * SIZE


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


# (format of attn_qkv, of the others, of the matrix of both)
FORMATS = [
    *((f, f, f) for f in ("q8_0", "q4_k", "iq4_xs", "f16")),
    ("q5_k", "q4_k", "q5_k"),
    ("q4_k", "q5_k", "q5_k"),
    ("q6_k", "q5_k", "q8_0"),
]


@pytest.mark.parametrize(("qkv", "others", "both"), FORMATS)
def test_a_file_has_the_values_of_its_tensors(
    qkv: str, others: str, both: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path / "a.gguf", qkv, others)
    model, tokenizer, warned = load_quietly(path)
    is_new = both not in (qkv, others)
    assert len(warned) == is_new and all("packed again in q8_0" in text for text in warned)
    found, wanted = dense_state(model), dense_state(load_quietly(decoded(path, "qwen3next"))[0])
    for layer in (layer.linear_attn.in_proj_qkvz for layer in model.model.layers[:3]):
        assert isinstance(layer, QuantLinear) and layer.format == both
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if is_new and "in_proj_qkvz" in name:
            # Half a code of the block's largest value, and that scale as f16.
            most = value.view(len(value), -1, 32).abs().amax(-1, keepdim=True)
            off = (found[name] - value).view(len(value), -1, 32).abs()
            assert (off <= most * (0.5 / 127 + 2**-11)).all() and off.any()
        else:
            assert torch.equal(found[name], value), name
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

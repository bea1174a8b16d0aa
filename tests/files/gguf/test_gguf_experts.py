"""Experts of GGUF files: views of the file, other layouts, values that older files lack, saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted_models import Tensors, logits, random_model, write_record
from expert_models import expert_model
from gguf import GGUFReader
from gguf_files import fields_of, load_quietly, mapped

from torch_metalmm import QuantExperts, load_gguf, quantize_, save_gguf


def joined(tensors: Tensors) -> None:
    for name in [n for n in tensors if "ffn_gate_exps" in n]:
        (gate, format), (up, _) = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate((gate, up), 1), format


def test_a_stack_of_both_is_a_view_of_the_file(tmp_path: Path) -> None:
    """It is the model's own; test_converted.py has stacks of gate and of up."""
    path = write_record(tmp_path / "m.gguf", "qwen3-moe", joined)
    model, _, warned = load_quietly(path)
    assert warned == []
    experts = [m for m in model.modules() if isinstance(m, QuantExperts)]
    stacks = ("gate_up_proj", "down_proj")
    assert len(experts) == 3 and {tuple(m.formats) for m in experts} == {stacks}
    assert all(mapped(path, m.get_parameter(stack)) for m in experts for stack in stacks)
    assert torch.allclose(logits(model), logits(random_model("qwen3-moe")), rtol=0, atol=1e-5)


UNSET = {"group_count": 0, "group_used_count": 0, "weights_scale": 0.0}


@pytest.mark.parametrize("zeros", [False, True])
def test_values_that_older_files_leave_out(tmp_path: Path, zeros: bool) -> None:
    """Read as llama.cpp reads them, not as the defaults of the model's class."""
    left_out = {f"expert_{key}": zero if zeros else None for key, zero in UNSET.items()}
    left_out["expert_weights_norm"] = None
    path = write_record(tmp_path / "old.gguf", "deepseek-v3", **left_out)
    alone = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
    want = logits(random_model("deepseek-v3", **alone))
    assert torch.allclose(logits(load_quietly(path)[0]), want, rtol=0, atol=1e-5)


def test_a_correction_of_scores_that_is_missing_is_told(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if "exp_probs_b" in n]:
            del tensors[name]

    bad = write_record(tmp_path / "bad.gguf", "glm4-moe", change)
    with pytest.warns(
        UserWarning, match=r"no tensor for model.layers.\*.*correction_bias \(2\); as"
    ):
        load_gguf(bad)


def test_a_latent_that_is_scaled(tmp_path: Path) -> None:
    """The multiplier of such files is a tenth of mscale_all_dim."""
    rope = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 3.0, "mscale": 0.707}
    rope |= {"original_max_position_embeddings": 32, "mscale_all_dim": 0.707}
    model = random_model("deepseek-v2", rope_parameters=rope)
    save_gguf(model, None, tmp_path / "a.gguf")
    fields = fields_of(tmp_path / "a.gguf", "deepseek2.")
    scaling = {key: value for key, value in fields.items() if key.startswith("rope.scaling.")}
    assert fields["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707)
    assert fields["expert_gating_func"] == 1  # which the converter leaves out
    path = write_record(tmp_path / "b.gguf", "deepseek-v2", **scaling)
    assert torch.allclose(logits(load_quietly(path)[0]), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config"), [("Qwen3Moe", {"norm_topk_prob": True}), ("Llama4Text", {})]
)
def test_packed_stacks_are_saved(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    """Those of quantize_, with gate and up in one; test_mxfp4.py has rows of both in turn."""
    model = quantize_(expert_model(kind, **config), "q8_0", progress=False)
    save_gguf(model, None, tmp_path / "a.gguf")
    found = {t.name: t for t in GGUFReader(tmp_path / "a.gguf").tensors}
    experts = {n: m for n, m in model.named_modules() if isinstance(m, QuantExperts)}
    assert experts
    for name, module in experts.items():
        gate, up = module.get_parameter("gate_up_proj").chunk(2, 1)
        parts = {"gate": gate, "up": up, "down": module.get_parameter("down_proj")}
        for part, want in parts.items():
            stored = found[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"]
            assert stored.tensor_type.name == "Q8_0"
            assert np.array_equal(np.array(stored.data), want.numpy())

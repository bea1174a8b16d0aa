"""Mixtures of experts: experts stacked in one tensor stay dense, and whoever loads them is told."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
import transformers
from mlx.utils import tree_flatten

from torch_metalmm import MetalMMConfig, load_mlx, quantize_, save_mlx

mlx_lm = pytest.importorskip("mlx_lm.utils")  # it needs Python 3.11

pytestmark = [pytest.mark.filterwarnings("error")]

EXPERTS, H, FFN = 4, 128, 64
LEFT = (
    r"left dense, (\d+)% of the weights: experts stacked in one tensor, for which there is no "
    r"packed layer: model.layers.\*.mlp.experts.gate_up_proj \(2\), .*down_proj \(2\)"
)


def model() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=H,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=FFN,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def load(folder: Path, **options: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, experts_implementation="eager", **options)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([[5, 6, 7]])).logits
    return out


def test_experts_stay_dense_with_a_warning(tmp_path: Path) -> None:
    dense = model()
    dense.save_pretrained(tmp_path / "dense")
    with pytest.warns(UserWarning, match=LEFT) as said:
        quantize_(dense, "q8_0", progress=False)
    # 2 layers of 3 H FFN for each expert, among all matrices of the model
    left = 2 * EXPERTS * 3 * H * FFN
    packed = sum(
        m.in_features * m.out_features
        for m in dense.modules()
        if hasattr(m, "format") and hasattr(m, "in_features")
    )
    packed += 320 * H
    assert f"{left / (left + packed):.0%}" in str(said[0].message)
    with pytest.warns(UserWarning, match=LEFT):
        loaded = load(tmp_path / "dense", quantization_config=MetalMMConfig("q8_0"))
    assert torch.equal(logits(loaded), logits(dense))
    loaded.save_pretrained(tmp_path / "packed")
    again, want = load(tmp_path / "packed").state_dict(), dense.state_dict()
    assert again.keys() == want.keys() and all(torch.equal(again[n], want[n]) for n in want)


def test_who_does_not_ask_for_them_is_not_told(tmp_path: Path) -> None:
    quantize_(model(), {"*.self_attn.*": "q8_0", "lm_head": "q8_0"}, progress=False)
    quantize_(model(), lambda name, module: "q8_0", progress=False)
    model().save_pretrained(tmp_path)
    config = MetalMMConfig("q8_0", skip=["experts"])
    load(tmp_path, quantization_config=config)


def test_mlx_checkpoints_of_experts_are_refused(tmp_path: Path) -> None:
    ours = model()
    with pytest.raises(ValueError, match="mlx-lm has other names for experts stacked in one"):
        save_mlx(ours, None, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    config = ours.config.to_dict() | {"rope_theta": 1e4, "num_experts": EXPERTS}
    qwen3_moe = import_module("mlx_lm.models.qwen3_moe")
    theirs = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    theirs, config = mlx_lm.quantize_model(theirs, config, 64, 4)
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), dict(tree_flatten(theirs.parameters()))
    )
    message = r"has experts stacked in one tensor, for which there is no packed layer: model.layers"
    with pytest.raises(ValueError, match=message):
        load_mlx(tmp_path)

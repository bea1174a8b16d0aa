"""MLX checkpoints of mixtures of experts, against mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from expert_models import EXPERTS, IDS, expert_model, logits
from mlx_files import from_mlx, logits_of_mlx_lm, quantize_by_mlx_lm, read, same_tensors
from spoiled_folders import refused, tensor

from torch_metalmm import QuantExperts, load_mlx, quantize_, save_mlx

pytest.importorskip("mlx_lm.utils")  # it needs Python 3.11

PLAIN = {"rope_type": "default", "rope_theta": 1e4}  # mlx-lm rounds the ends of GPT-OSS's scaling
# kind -> what mlx-lm computes otherwise, and its name of the first stack
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "Mixtral": ({}, "block_sparse_moe.switch_mlp"),
    "Qwen2Moe": ({}, "mlp.switch_mlp"),
    "Qwen3Moe": ({"norm_topk_prob": True}, "mlp.switch_mlp"),
    "Olmoe": ({"norm_topk_prob": True}, "mlp.switch_mlp"),
    "Glm4Moe": ({"attention_bias": True, "use_qk_norm": True}, "mlp.switch_mlp"),
    "GptOss": ({"rope_parameters": PLAIN}, "mlp.experts"),
}


def error_of(kind: str) -> torch.Tensor:
    """8 times what rounding to f32 changes in the dense model: sums in another order, twice."""
    config = KINDS[kind][0]
    exact = logits(expert_model(kind, **config).double())
    return 8 * (logits(expert_model(kind, **config)) - exact).abs().max()


def mlx_logits(folder: Path) -> torch.Tensor:
    return logits_of_mlx_lm(folder, IDS)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_mlx_lm_runs(tmp_path: Path, kind: str) -> None:
    config, block = KINDS[kind]
    dense = expert_model(kind, **config)
    save_mlx(dense, None, tmp_path / "dense")
    assert (mlx_logits(tmp_path / "dense") - logits(dense)).abs().max() <= error_of(kind)

    def predicate(name: str, module: Any) -> bool:
        return not name.endswith(("gate", "router")) and hasattr(module, "to_quantized")

    quantize_by_mlx_lm(tmp_path / "dense", tmp_path / "mlx", predicate=predicate)
    names = read(tmp_path / "mlx").keys()
    assert f"model.layers.1.{block}.gate_proj.scales" in names
    model, _ = load_mlx(tmp_path / "mlx")
    experts = [m for m in model.modules() if isinstance(m, QuantExperts)]
    assert {f for m in experts for f in m.formats.values()} == {"affine4_g64_f32"}
    want = mlx_logits(tmp_path / "mlx")
    assert (logits(model) - want).abs().max() <= error_of(kind)
    save_mlx(model, None, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again"), read(tmp_path / "mlx"))
    assert torch.equal(mlx_logits(tmp_path / "again"), want)


def test_routers_that_mlx_quantized_are_decoded(tmp_path: Path) -> None:
    save_mlx(expert_model(norm_topk_prob=True), None, tmp_path / "dense")
    quantize_by_mlx_lm(tmp_path / "dense", tmp_path / "mlx")
    assert "model.layers.0.mlp.gate.scales" in read(tmp_path / "mlx")
    model, _ = load_mlx(tmp_path / "mlx")
    gate = model.model.layers[0].mlp.gate.weight
    parts = read(tmp_path / "mlx")
    given = [parts[f"model.layers.0.mlp.gate.{leaf}"] for leaf in ("weight", "scales", "biases")]
    sizes = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    own = sizes.get("model.layers.0.mlp.gate", sizes)
    want = mx.dequantize(*given, group_size=own["group_size"], bits=own["bits"])
    assert torch.equal(gate, from_mlx(want))
    assert (logits(model) - mlx_logits(tmp_path / "mlx")).abs().max() <= error_of("Qwen3Moe")


@pytest.mark.parametrize("format", ["affine4_g64_f32", "mxfp4", "affine8_g32_f32"])
def test_packed_here_and_run_by_mlx_lm(tmp_path: Path, format: str) -> None:
    model = quantize_(expert_model(norm_topk_prob=True), format, progress=False)
    save_mlx(model, None, tmp_path)
    assert (logits(model) - mlx_logits(tmp_path)).abs().max() <= error_of("Qwen3Moe")
    again, _ = load_mlx(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_what_mlx_has_no_name_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mlx-lm's names of experts are not known for granitemoe"):
        save_mlx(expert_model("GraniteMoe"), None, tmp_path)
    model = quantize_(expert_model(), {"*.experts": "q4_0"}, progress=False)
    with pytest.raises(ValueError, match="experts.gate_up_proj is q4_0, which MLX has not"):
        save_mlx(model, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_biases_of_experts_are_floats(tmp_path: Path) -> None:
    save_mlx(quantize_(expert_model("GptOss"), "affine4_g64", progress=False), None, tmp_path)
    integers = tensor("model.layers.1.mlp.experts.down_proj.bias", torch.Tensor.int)
    refused(load_mlx, tmp_path, integers, "down_proj.bias is torch.int32 ")


def test_a_correction_of_scores_is_needed(tmp_path: Path) -> None:
    """It is a buffer, and zeros would choose other experts."""
    save_mlx(quantize_(expert_model("Glm4Moe"), "affine4_g64", progress=False), None, tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    refused(load_mlx, tmp_path, tensor(name, None), f"has no tensor for {name}")


PLACE = "model.layers.1.mlp.switch_mlp"


@pytest.mark.parametrize(
    ("leaf", "change", "message"),
    [
        ("up_proj.weight", None, "has no tensor for model.layers.1.mlp.experts.up_proj"),
        ("up_proj.scales", None, rf"{PLACE}.up_proj.weight is torch.uint32 .*has no scales"),
        ("down_proj.biases", None, f"{PLACE}.down_proj: biases are missing"),
        (
            "gate_proj.weight",
            lambda t: t[:-1],
            rf"{PLACE}.gate_proj: weight is .*{EXPERTS} experts",
        ),
        ("gate_proj.scales", lambda t: t[:, :-1], f"{PLACE}.gate_proj: scales and biases are not"),
        (
            "up_proj.scales",
            lambda t: t.transpose(0, 1).contiguous(),
            f"{PLACE}.up_proj: scales and biases are not",
        ),
        ("down_proj.weight", lambda t: t[..., :-1], f"{PLACE}.down_proj"),
    ],
)
def test_damaged_stacks(tmp_path: Path, leaf: str, change: Any, message: str) -> None:
    model = quantize_(expert_model(), "affine4_g64", progress=False)
    save_mlx(model, None, tmp_path)
    refused(load_mlx, tmp_path, tensor(f"{PLACE}.{leaf}", change), message)

"""load_quantized: GPT-OSS's own checkpoints, whose experts are mxfp4, against transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from expert_models import EXPERTS, FFN, check_equals, decoded, expert_model, greedy
from expert_models import H as WIDTH
from gguf import GGUFReader
from safetensors.torch import save_file
from spoiled_folders import Spoil, refused, tensor
from torch import Tensor

from torch_metalmm import QuantExperts, load_packed, load_quantized, quantize_, save_gguf
from torch_metalmm.models.experts import homes

SHAPES = {"gate_up_proj": (2 * FFN, WIDTH), "down_proj": (WIDTH, FFN)}
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as OpenAI's: two codes a byte, the first low, and a scale for 32 codes."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = expert_model("GptOss")
    model.config.save_pretrained(folder)
    tensors = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    g = torch.Generator().manual_seed(3)
    for name in [n for n in tensors if n.endswith(tuple(SHAPES))]:
        rows, k = SHAPES[name.rpartition(".")[2]]
        del tensors[name]
        size = (EXPERTS, rows, k // 32)
        tensors[f"{name}_blocks"] = _bytes(0, 256, (*size, 16), g)
        tensors[f"{name}_scales"] = _bytes(118, 124, size, g)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": QUANTIZATION, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _bytes(low: int, high: int, size: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(low, high, size, generator=g, dtype=torch.uint8)


def reference(folder: Path) -> Any:
    """transformers' model, experts decoded to bf16 by its loader, in which they are exact; f32."""
    config = transformers.Mxfp4Config(dequantize=True)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    model.set_experts_implementation("eager")  # the others take no float64
    return model.float()


def test_experts_stay_packed(good: Path, tmp_path: Path) -> None:
    model, tokenizer = load_quantized(good, dtype=torch.float32)
    theirs = reference(good)
    assert tokenizer is None
    experts = {n: m for n, m in model.named_modules() if isinstance(m, QuantExperts)}
    assert list(experts) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    for name, module in experts.items():
        assert module.formats == dict.fromkeys(SHAPES, "mxfp4") and module.gate.interleaved
        dense = theirs.get_submodule(name)
        for stack in SHAPES:
            want = dense.get_parameter(stack).transpose(1, 2)
            assert torch.equal(module.dequantize(stack), want)
            bias = f"{stack}_bias"
            assert torch.equal(module.get_parameter(bias), dense.get_parameter(bias))
    assert torch.equal(greedy(model), greedy(theirs))
    check_equals(model, decoded(theirs, model))
    model.save_pretrained(tmp_path / "again")
    again, _ = load_packed(tmp_path / "again")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    save_gguf(model, None, tmp_path / "model.gguf")
    saved = {t.name: t for t in GGUFReader(tmp_path / "model.gguf").tensors}
    for name, module in experts.items():
        both = module.get_parameter("gate_up_proj").numpy()
        parts = {"gate": both[:, ::2], "up": both[:, 1::2]}
        parts["down"] = module.get_parameter("down_proj").numpy()
        for part, want in parts.items():
            found = saved[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"]
            assert found.tensor_type.name == "MXFP4"
            assert np.array_equal(np.array(found.data), want)


def test_another_format_of_what_is_packed(good: Path) -> None:
    """Decoded to bf16, which has every value in half the memory of f32."""
    model, _ = load_quantized(good)
    wanted = {}
    for name, home in homes(model).items():
        for leaf, stack in home.stacks.items():
            want = home.made.dequantize(leaf)
            dense = stack.dense()
            assert dense.dtype == torch.bfloat16
            assert torch.equal(dense.float(), want.flatten(0, 1)), (name, leaf)
            wanted[f"{name}.{leaf}"] = torch.ops.metalmm.quantize(want.flatten(0, 1), "q4_0")
    quantize_(model, {"*.experts": "q4_0"}, progress=False)
    for parameter, packed in wanted.items():
        assert torch.equal(model.get_parameter(parameter).flatten(0, 1), packed), parameter


def test_activations_in_the_dtype_of_the_file(good: Path) -> None:
    model, _ = load_quantized(good)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == torch.uint8
    assert experts.gate_up_proj_bias.dtype == model.lm_head.weight.dtype == torch.bfloat16


PLACE = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (tensor(f"{PLACE}down_proj_scales", None), "no tensor for .*layers.1.*down_proj_scales"),
        (
            tensor(f"{PLACE}gate_up_proj_blocks", None),
            "no tensor for .*layers.1.*gate_up_proj_blocks",
        ),
        (tensor(f"{PLACE}down_proj_bias", None), "no tensor for .*layers.1.*down_proj_bias"),
        (tensor("lm_head.weight", None), "no tensor for lm_head.weight"),
        (
            tensor(f"{PLACE}down_proj_blocks", lambda t: t[:5]),
            r"is torch.uint8 \[5, 128, 2, 16\]; the model makes it torch.uint8 \[6, 128, 2, 16\]",
        ),
        (
            tensor(f"{PLACE}gate_up_proj_scales", lambda t: t.flatten(1)),
            r"gate_up_proj_scales is torch.uint8 \[6, 512\]; the model makes .* \[6, 128, 4\]",
        ),
        (
            tensor(f"{PLACE}gate_up_proj_bias", lambda t: t[:, 1:]),
            r"gate_up_proj_bias is torch.bfloat16 \[6, 127\]; the model makes it .* \[6, 128\]",
        ),
        (
            tensor(f"{PLACE}down_proj_blocks", lambda t: t.float()),
            "down_proj_blocks is torch.float32 .*; the model makes it torch.uint8",
        ),
        (
            tensor(f"{PLACE}down_proj_scales", lambda t: t.fill_(255)),
            r"down_proj of expert 0: mxfp4: a scale is NaN \(e = 255\)",
        ),
        (
            tensor("model.x", lambda t: torch.zeros(1)),
            "has tensors the model does not: model.x",
        ),
    ],
)
def test_folders_that_do_not_fit(good: Path, tmp_path: Path, spoil: Spoil, message: str) -> None:
    refused(load_quantized, Path(shutil.copytree(good, tmp_path / "bad")), spoil, message)


def test_a_model_without_experts_is_refused(good: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    values = config.to_dict() | {"quantization_config": QUANTIZATION}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no experts, which alone are mxfp4"):
        load_quantized(tmp_path)

"""Layers whose weight a model of transformers reads outside of their own forward stay dense."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from torch_metalmm import MetalMMConfig, QuantEmbedding, QuantLinear, quantize_

IDS = torch.tensor([[5, 77, 30, 9, 21, 44, 18]])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
POSITIONS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
SAM = {
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"image_size": 64, "patch_size": 16, "output_channels": 32, "mlp_dim": 64}
    | {"global_attn_indexes": [1], "num_pos_feats": 16},
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4},
}
PIXELS = torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)
SOUND = torch.linspace(-20, 20, 4000)[None].sin()

# class -> (arguments of its config, inputs, a part of the name of each layer that must stay dense)
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor], set[str]]] = {
    "DebertaForMaskedLM": (
        SIZES | POSITIONS,
        {"input_ids": IDS},
        {"rel_embeddings", "in_proj"},
    ),
    "DebertaV2ForMaskedLM": (SIZES | POSITIONS, {"input_ids": IDS}, {"rel_embeddings"}),
    "WavLMModel": (SIZES, {"input_values": SOUND}, {"q_proj", "k_proj", "v_proj", "out_proj"}),
    "SamModel": (
        SAM,
        {"pixel_values": PIXELS, "input_points": torch.full((1, 1, 1, 2), 20.0)},
        {"point_embed.0", "not_a_point_embed", "no_mask_embed", "iou_token", "mask_tokens"},
    ),
    "RwkvForCausalLM": (
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 32},
        {"input_ids": IDS},
        {"attention.output", "feed_forward.value"},
    ),
    "T5ForConditionalGeneration": (  # casts to the dtype of this weight
        {"vocab_size": 96, "d_model": 64, "d_kv": 2, "d_ff": 64, "num_layers": 1, "num_heads": 32},
        {"input_ids": IDS, "decoder_input_ids": IDS},
        {"DenseReluDense.wo"},
    ),
    "LlamaForCausalLM": (SIZES, {"input_ids": IDS}, set()),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**CASES[name][0])).eval()


def packed_names(model: Any) -> set[str]:
    kinds = (QuantLinear, QuantEmbedding)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def said(name: str) -> Any:
    """A warning names such a layer, if there is one."""
    match = f"^left dense, .*: .*({'|'.join(CASES[name][2])})"
    return pytest.warns(UserWarning, match=match) if CASES[name][2] else nullcontext()


def answers(model: Any, name: str) -> list[Tensor]:
    with torch.inference_mode():
        out = model(**CASES[name][1])
    return [t for t in out.values() if isinstance(t, Tensor)]


@pytest.mark.filterwarnings("ignore:K is not a multiple")
@pytest.mark.parametrize("name", CASES)
def test_layers_that_other_code_reads_stay_dense(name: str) -> None:
    """Packed as f32 the others compute the same sums, in another order."""
    dense = model_of(name)
    with said(name):
        model = quantize_(copy.deepcopy(dense), "f32", progress=False)
    packed = packed_names(model)
    assert packed
    for part in CASES[name][2]:
        assert any(part in n for n, _ in dense.named_modules())
        assert not any(part in n for n in packed)
    for got, want in zip(answers(model, name), answers(dense, name), strict=True):
        assert (got - want).abs().max() <= 2.0**-16 * want.abs().max()


@pytest.mark.filterwarnings("ignore:left dense")
def test_also_while_a_checkpoint_loads(tmp_path: Any) -> None:
    name = "DebertaV2ForMaskedLM"
    dense = model_of(name)
    dense.save_pretrained(tmp_path)
    config = MetalMMConfig(format="f32")
    model = type(dense).from_pretrained(tmp_path, quantization_config=config).eval()
    assert packed_names(model) == packed_names(quantize_(dense, "f32", progress=False))


def test_a_model_whose_code_reads_no_weight_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("LlamaForCausalLM")
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("it was run"))
    quantize_(model, "f32", progress=False)


def test_no_kernel_of_triton_runs_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class JITFunction:
        def run(self, *_: Any) -> None:
            raise AssertionError("launched")

    launched = JITFunction.run
    module = ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)
    model, errors = model_of("WavLMModel"), list[Exception]()

    def launch(*_: Any) -> None:
        try:
            JITFunction().run()
        except Exception as error:
            errors.append(error)
            raise

    model.encoder.layers[1].register_forward_pre_hook(launch)
    quantize_(model, "q8_0", progress=False)
    assert errors and all("Triton" in str(error) for error in errors)
    assert JITFunction.run is launched
    # What was read before the kernel is known.
    assert type(model.encoder.layers[0].attention.q_proj) is nn.Linear

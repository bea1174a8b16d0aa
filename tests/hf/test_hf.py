"""MetalMMConfig in transformers: packing while loading, saving, loading back."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import ARCHITECTURES, logits, packed_bytes, random_model, same_bytes, tokens
from safetensors import safe_open
from spoiled_folders import stored
from torch import nn
from transformers.trainer_utils import validate_quantization_for_training

from torch_metalmm import MetalMMConfig, QuantLinear, formats, quantize_
from torch_metalmm.models.replace import dense_weight

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.usefixtures("quiet_transformers"),
]

FORMATS = ("q8_0", "q6_k", "q4_k", "affine4_g64")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """dense(architecture): a folder with the random model of it, as save_pretrained writes it."""
    root = tmp_path_factory.mktemp("dense")

    def folder(architecture: str) -> Path:
        if not (root / architecture).exists():
            random_model(architecture).save_pretrained(root / architecture)
        return root / architecture

    return folder


def load(architecture: str, folder: Path, **options: Any) -> Any:
    return getattr(transformers, ARCHITECTURES[architecture][0]).from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("architecture", "format"), list(zip(sorted({*ARCHITECTURES} - {"t5"}), cycle(FORMATS)))
)
def test_quantize_save_load(tmp_path: Path, dense: Any, architecture: str, format: str) -> None:
    config = MetalMMConfig(format)
    packed = load(architecture, dense(architecture), quantization_config=config)
    source = random_model(architecture)
    for name, (kind, weight) in packed_bytes(packed).items():
        want = formats.get(format).quantize(dense_weight(source.get_submodule(name)))
        assert kind == format and torch.equal(weight, want), name
    in_place = quantize_(source, format, progress=False)
    assert same_bytes(packed, in_place) and torch.equal(logits(packed), logits(in_place))

    packed.save_pretrained(tmp_path)
    loaded = load(architecture, tmp_path)
    assert same_bytes(loaded, packed) and torch.equal(logits(loaded), logits(packed))
    if loaded.can_generate():
        assert torch.equal(tokens(loaded), tokens(packed))
    assert stored(tmp_path) == {
        "quant_method": "metalmm",
        "modules": dict.fromkeys(packed_bytes(packed), format),
    }
    tied = source.config.tie_word_embeddings and source.get_output_embeddings() is not None
    for model in (packed, loaded):
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == tied


def test_an_import_behind_transformers_is_all_that_loading_needs(
    tmp_path: Path, dense: Any
) -> None:
    """In this process torch_metalmm is imported first; test_lora.py: that imports neither it nor
    PEFT."""
    config = MetalMMConfig("q8_0")
    packed = load("qwen2", dense("qwen2"), quantization_config=config)
    packed.save_pretrained(tmp_path)
    script = f"""
import transformers, torch_metalmm
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
print(type(model.lm_head).__name__, model.lm_head.format, model.config.quantization_config.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == f"QuantLinear q8_0 {dict.fromkeys(packed_bytes(packed), 'q8_0')}\n"
    assert "skip the quantization" not in run.stderr


def test_peak_memory_is_the_packed_model_and_one_dense_weight(tmp_path: Path) -> None:
    script = Path(__file__).parent / "hf_memory.py"
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True
    )
    sizes = json.loads(run.stdout.splitlines()[-1])
    print({name: f"{size / 1e6:.1f} MB" for name, size in sizes.items()})
    assert sizes["growth"] >= sizes["packed"]  # else it was not measured
    # The largest dense weight is 34 MB; 15 to 38 MB beside the packed model were seen, most where
    # other programs ran: heaps of threads.
    most = sizes["packed"] + sizes["largest"] + 16e6
    assert sizes["growth"] <= most < sizes["dense"]


def test_modules_skip_and_format(dense: Any) -> None:
    config = MetalMMConfig(
        "Q4_K", modules={"*.k_proj": "q8_0", "*.v_proj": None}, skip=["lm_head", "layers.1.mlp"]
    )
    model = load("llama", dense("llama"), quantization_config=config)
    layers = model.model.layers
    assert layers[0].self_attn.k_proj.format == "q8_0"
    assert layers[0].mlp.up_proj.format == layers[1].self_attn.q_proj.format == "q4_k"
    for left in (model.lm_head, layers[0].self_attn.v_proj, layers[1].mlp.up_proj):
        assert type(left) is nn.Linear and left.weight.dtype == torch.float32
    tied = load("qwen2", dense("qwen2"), quantization_config=MetalMMConfig("q4_k", skip="lm_head"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert type(tied.model.embed_tokens) is nn.Embedding
    only = MetalMMConfig(modules={"*mlp*": "q4_0"})
    assert len(packed_bytes(load("llama", dense("llama"), quantization_config=only))) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    random_model("gemma", dtype).save_pretrained(tmp_path / "dense")
    packed = load("gemma", tmp_path / "dense", quantization_config=MetalMMConfig("q6_k"))
    assert packed.dtype == dtype and logits(packed).dtype == dtype
    packed.save_pretrained(tmp_path / "packed")
    loaded = load("gemma", tmp_path / "packed")
    assert loaded.dtype == dtype and torch.equal(logits(loaded), logits(packed))
    wide = load("gemma", tmp_path / "packed", dtype=torch.float32)
    assert logits(wide).dtype == torch.float32 and same_bytes(wide, packed)
    assert torch.equal(logits(packed.to(torch.float32)), logits(wide))


def test_shards(tmp_path: Path, dense: Any) -> None:
    packed = load("llama", dense("llama"), quantization_config=MetalMMConfig("q8_0"))
    packed.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load("llama", tmp_path)
    assert same_bytes(loaded, packed) and torch.equal(logits(loaded), logits(packed))
    loaded.save_pretrained(tmp_path)  # over the files that it is a view of
    assert same_bytes(loaded, packed)
    assert not list(tmp_path.glob("model-*.safetensors"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.1.mlp.up_proj.weight").dtype == torch.uint8
    with pytest.warns(UserWarning, match="quantization_config` from the model will be used"):
        again = load("llama", tmp_path, quantization_config=MetalMMConfig("q4_0"))
    assert same_bytes(again, packed)


def test_new_heads_stay_dense(tmp_path: Path, dense: Any) -> None:
    config = MetalMMConfig("q8_0")
    kind = transformers.AutoModelForSequenceClassification
    fresh = kind.from_pretrained(dense("llama"), quantization_config=config, num_labels=3)
    load("llama", dense("llama"), quantization_config=config).save_pretrained(tmp_path)
    stored = kind.from_pretrained(tmp_path, num_labels=3)
    for model in (fresh, stored):
        assert type(model.score) is nn.Linear and model.score.weight.requires_grad
        assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)


@pytest.mark.parametrize("architecture", ["llama", "bert", "gpt2"])
def test_the_base_model_loads_from_the_whole_one(
    tmp_path: Path, dense: Any, architecture: str
) -> None:
    whole = load(architecture, dense(architecture), quantization_config=MetalMMConfig("q6_k"))
    whole.save_pretrained(tmp_path / "whole")
    base = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(logits(base), logits(whole.base_model))
    base.save_pretrained(tmp_path / "base")
    assert "lm_head" not in (tmp_path / "base" / "config.json").read_text()
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(again), logits(base))


def test_an_untied_head_of_a_tied_config(tmp_path: Path) -> None:
    model = random_model("qwen2")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["lm_head.weight"] += 1
    kind = transformers.Qwen2ForCausalLM
    config = MetalMMConfig("q8_0")
    packed = kind.from_pretrained(
        None, config=model.config, state_dict=state, quantization_config=config
    )
    assert not torch.equal(packed.lm_head.weight, packed.model.embed_tokens.weight)
    packed.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert same_bytes(loaded, packed) and torch.equal(logits(loaded), logits(packed))


def test_what_transformers_asks_the_quantizer(dense: Any) -> None:
    model = load("llama", dense("llama"), quantization_config=MetalMMConfig("q8_0"))
    quantizer = model.hf_quantizer
    assert quantizer.is_serializable() and quantizer.is_trainable and quantizer.is_compileable
    assert model.is_quantized and model.quantization_method == "metalmm"
    with pytest.raises(ValueError, match="attach trainable adapters"):
        validate_quantization_for_training(model)
    with pytest.raises(ValueError, match="save a packed model first"):
        load(
            "llama",
            dense("llama"),
            quantization_config=MetalMMConfig("q8_0"),
            device_map={"": "disk"},
        )


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "qwen2"])
def test_dequantize(dense: Any, tmp_path: Path, architecture: str) -> None:
    model = load(architecture, dense(architecture), quantization_config=MetalMMConfig("q8_0"))
    packed = {n: m.dequantize() for n, m in model.named_modules() if hasattr(m, "format")}
    model = model.dequantize()
    for name, weight in packed.items():
        assert torch.equal(dense_weight(model.get_submodule(name)), weight), name
    assert type(model.get_input_embeddings()) is type(
        random_model(architecture).base_model.get_input_embeddings()
    )
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits(load(architecture, tmp_path)), logits(model))


def test_casts_of_a_packed_model() -> None:
    """transformers refuses half() and float() of what any quantizer made."""
    model = quantize_(random_model("llama"), "q8_0", progress=False)
    before = quantize_(random_model("llama"), "q8_0", progress=False)
    exact = logits(model)
    assert model.half() is model and logits(model).dtype == model.dtype == torch.float16
    with pytest.raises(ValueError, match=r"double\(\): packed .* float32, float16 or bfloat16"):
        model.double()
    assert model.float().dtype == torch.float32 and same_bytes(model, before)
    assert (logits(model) - exact).abs().max() <= 2.0**-6 * exact.abs().max()  # norms in f16
    dense = random_model("llama")
    assert dense.double().dtype == torch.float64 and dense.half().dtype == torch.float16

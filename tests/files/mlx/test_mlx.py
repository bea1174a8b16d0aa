"""load_mlx and save_mlx: checkpoints that mlx wrote, bit for bit, and models that mlx-lm runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import IDS, change_config, logits, packed_bytes, random_model, same_bytes
from oracle import Value, check, gamma
from torch import nn

from torch_metalmm import load_mlx, quantize_, save_mlx
from torch_metalmm.models.replace import packable, weight_shape

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm.utils")  # it needs Python 3.11
from mlx_files import (  # noqa: E402
    from_mlx,
    logits_of_mlx_lm,
    quantize_by_mlx_lm,
    read,
    same_tensors,
    write,
)

AFFINE = [
    {"group_size": group, "bits": bits, "mode": "affine"}
    for bits in (2, 3, 4, 5, 6, 8)
    for group in (32, 64, 128)
]
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
FOUR = {"group_size": 64, "bits": 4}


def small_llama(**config: Any) -> Any:
    return random_model("llama", num_hidden_layers=1, **config)


DTYPES = ("f16", "bf16", "f32")
PACKINGS = [*AFFINE, MXFP4, MXFP8, NVFP4]
# Each packing in one of the dtypes, and each dtype with one of each mode.
WITH_DTYPES = [(sizes, DTYPES[i % 3]) for i, sizes in enumerate(PACKINGS)]
WITH_DTYPES += [(s, dtype) for s in (AFFINE[7], MXFP4, MXFP8, NVFP4) for dtype in DTYPES]
WITH_DTYPES = [row for i, row in enumerate(WITH_DTYPES) if row not in WITH_DTYPES[:i]]


def planes_of(tensors: dict[str, Any], layer: str) -> list[Any]:
    """Codes, scales and biases, or None: mlx rounds to the dtype of the scales, which is f32."""
    planes = [tensors.get(f"{layer}.{leaf}") for leaf in ("weight", "scales", "biases")]
    if planes[2] is not None:
        planes[1:] = [t.astype(mx.float32) for t in planes[1:]]
    return planes


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    WITH_DTYPES,
    ids=lambda s: s if isinstance(s, str) else "-".join(map(str, s.values())),
)
def test_every_packing(tmp_path: Path, sizes: dict[str, Any], dtype: str) -> None:
    tensors = write(tmp_path / "mlx", small_llama(tie_word_embeddings=True), sizes, dtype)
    model, tokenizer = load_mlx(tmp_path / "mlx")
    assert tokenizer is None and not any(p.requires_grad for p in model.parameters())
    assert len(packed_bytes(model)) == 9  # the tied head too
    for name, layer in model.named_modules():
        if name == "lm_head" or not hasattr(layer, "format"):
            continue
        weight = from_mlx(mx.dequantize(*planes_of(tensors, name), **sizes, dtype=mx.float32))
        assert torch.equal(layer.dequantize(), weight), name
    layer = model.model.layers[0].mlp.down_proj
    name = "model.layers.0.mlp.down_proj"
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    planes = planes_of(tensors, name)
    theirs = from_mlx(mx.quantized_matmul(mx.array(x.numpy()), *planes, **sizes))
    w = layer.dequantize()
    ours = Value.of(x).dot(w) + Value.of(
        layer.bias.float() if layer.bias is not None else 0 * w[:, 0]
    )
    # mlx decodes a weight with two roundings more than the specification, and its terms may cancel.
    scales = from_mlx(planes[1]).float().abs().repeat_interleave(sizes["group_size"], 1)
    parts = 2 * (2 ** sizes["bits"] * scales + w.abs()) if planes[2] is not None else w.abs()
    slack = gamma(512 + 3) * (x.abs().double() @ parts.double().T)
    check(layer(x), ours)
    check(theirs, Value(Value.of(x).dot(w).exact, Value.of(x).dot(w).error + slack))
    save_mlx(model, None, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again"), tensors)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == sizes


def mlx_logits(folder: Path) -> torch.Tensor:
    return logits_of_mlx_lm(folder, IDS)


ROPE = {"rope_theta": 5000.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": ROPE,
    "qwen2": ROPE,
    "qwen3": ROPE | {"tie_word_embeddings": True},
    "mistral": {},
    "gemma": {"hidden_act": "gelu_python"},  # mlx-lm has the exact GELU
    "gemma3": {"num_hidden_layers": 6, "rope_theta": 3000.0, "rope_local_base_freq": 500.0},
    "phi": {},
    "phi3": {},
    "gpt2": {},
}


def f32_error(architecture: str, **config: Any) -> torch.Tensor:
    """How far two f32 runs of the model may lie apart whose sums have other orders.

    Ours is off by what f64 shows. A sum of K terms is off by at most K - 1 roundings, and by about
    the square root where they are random: so theirs is off by at most sqrt(K) times ours.
    """
    config = MODELS[architecture] | config
    model = random_model(architecture, **config)
    ours = (logits(model) - logits(random_model(architecture, **config).double())).abs().max()
    layers = [m for m in model.modules() if packable(m) and not isinstance(m, nn.Embedding)]
    return ours * (1 + max(weight_shape(m)[1] for m in layers) ** 0.5)


@pytest.mark.parametrize("architecture", MODELS)
def test_models_that_mlx_lm_runs(tmp_path: Path, architecture: str) -> None:
    dense = random_model(architecture, **MODELS[architecture])
    save_mlx(dense, None, tmp_path / "dense")
    same = mlx_logits(tmp_path / "dense")
    assert (same - logits(dense)).abs().max() <= f32_error(architecture)

    quantize_by_mlx_lm(tmp_path / "dense", tmp_path / "mlx")
    want = mlx_logits(tmp_path / "mlx")
    model, _ = load_mlx(tmp_path / "mlx")
    assert type(model) is type(dense) and set(f for f, _ in packed_bytes(model).values()) == {
        "affine4_g64_f32"
    }
    assert (logits(model) - want).abs().max() <= f32_error(architecture)

    save_mlx(model, None, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again"), read(tmp_path / "mlx"))
    assert torch.equal(mlx_logits(tmp_path / "again"), want)


def test_layers_with_their_own_packing(tmp_path: Path) -> None:
    """mixed recipes: a default, 6 bits for the head, small floats, dense layers."""
    overrides = {
        "lm_head": {"group_size": 32, "bits": 6},
        "model.embed_tokens": {"group_size": 128, "bits": 8, "mode": "affine"},
        "model.layers.0.mlp.up_proj": MXFP4,
        "model.layers.0.mlp.down_proj": NVFP4,
        "model.layers.0.self_attn.q_proj": MXFP8,
        "model.layers.0.self_attn.v_proj": False,
        "model.layers.0.input_layernorm": False,
    }
    tensors = write(tmp_path, small_llama(), FOUR, "bf16", overrides)
    model, _ = load_mlx(tmp_path)
    formats = {name: format for name, (format, _) in packed_bytes(model).items()}
    assert formats["lm_head"] == "affine6_g32_bf16"
    assert formats["model.embed_tokens"] == "affine8_g128_bf16"
    assert formats["model.layers.0.mlp.up_proj"] == "mxfp4"
    assert formats["model.layers.0.mlp.down_proj"] == "nvfp4"
    assert formats["model.layers.0.self_attn.q_proj"] == "mxfp8"
    assert formats["model.layers.0.mlp.gate_proj"] == "affine4_g64_bf16"
    assert "model.layers.0.self_attn.v_proj" not in formats
    assert model.dtype == logits(model).dtype == torch.bfloat16
    save_mlx(model, None, tmp_path)  # over the old one
    assert same_tensors(read(tmp_path), tensors)
    config = json.loads((tmp_path / "config.json").read_text())["quantization"]
    assert config["bits"] == 4 and config["group_size"] == 64
    assert config["lm_head"] == {"group_size": 32, "bits": 6, "mode": "affine"}
    assert len(config) == 3 + 5


@pytest.mark.parametrize("recipe", ["mixed_2_6", "mixed_4_6"])
def test_recipes_of_mlx_lm(tmp_path: Path, recipe: str) -> None:
    """mlx-lm's recipes write "group_size": null into the entry of every layer."""
    convert = pytest.importorskip("mlx_lm.convert")
    save_mlx(random_model("llama"), None, tmp_path / "dense")
    theirs, _ = mlx_lm.load_model(tmp_path / "dense")
    mixed = convert.mixed_quant_predicate_builder(recipe, theirs, None)
    config = quantize_by_mlx_lm(tmp_path / "dense", tmp_path / "mlx", None, None, mixed)
    entries = [e for e in config["quantization"].values() if isinstance(e, dict)]
    assert entries and all(entry["group_size"] is None for entry in entries)
    model, _ = load_mlx(tmp_path / "mlx")
    low, high = recipe[6], recipe[8]
    formats = {name: format for name, (format, _) in packed_bytes(model).items()}
    assert formats["lm_head"] == f"affine{high}_g64_f32"
    assert set(formats.values()) == {f"affine{bits}_g64_f32" for bits in (low, high)}
    assert (logits(model) - mlx_logits(tmp_path / "mlx")).abs().max() <= f32_error("llama")


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_sizes_of_null_are_those_of_the_mode(tmp_path: Path, mode: str) -> None:
    sizes = {"affine": FOUR, "mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}[mode]
    tensors = write(tmp_path, small_llama(), sizes)
    unsaid = {"group_size": None, "bits": None, "mode": mode}
    change_config(tmp_path, quantization=unsaid | {"lm_head": unsaid})
    model, _ = load_mlx(tmp_path)
    save_mlx(model, None, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again"), tensors)


def test_shards_and_an_index_of_another_model(tmp_path: Path) -> None:
    tensors = write(tmp_path, small_llama(), FOUR)
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = tmp_path / f"model-0000{i}-of-00002.safetensors"
        mx.save_safetensors(str(file), {n: tensors[n] for n in part})
    stale = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00009.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(stale))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"x": mx.zeros(3)})
    model, _ = load_mlx(tmp_path)
    save_mlx(model, None, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again"), tensors)
    file.unlink()
    with pytest.raises(ValueError, match=r"biases are missing|weight is missing|has no tensor for"):
        load_mlx(tmp_path)


def test_tensors_that_mlx_lm_drops(tmp_path: Path) -> None:
    tensors = write(tmp_path, small_llama(tie_word_embeddings=True), FOUR)
    extra = {
        "lm_head.weight": mx.zeros((320, 256)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros(32),
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors | extra)
    model, _ = load_mlx(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert logits(model).abs().max() > 0


def test_a_config_of_before_transformers_5(tmp_path: Path) -> None:
    write(tmp_path, small_llama(rope_theta=5000.0), FOUR, "f32")
    want = mlx_logits(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("rope_parameters") and config["rope_theta"] == 5000.0
    config["torch_dtype"] = config.pop("dtype")
    for change in ({}, {"quantization_config": None}, {"quantization": None}):
        given = {k: v for k, v in (config | change).items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(given))
        model, _ = load_mlx(tmp_path)
        assert (logits(model) - want).abs().max() <= f32_error("llama", num_hidden_layers=1)


def test_dtype_and_generation_config(tmp_path: Path) -> None:
    write(tmp_path, small_llama(), FOUR, "bf16")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7], "top_k": 9}')
    model, _ = load_mlx(tmp_path, dtype=torch.float32)
    assert logits(model).dtype == torch.float32
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.lm_head.format == "affine4_g64_bf16"


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gpt2"])
def test_mlx_to_transformers_to_mlx(tmp_path: Path, architecture: str) -> None:
    tensors = write(tmp_path / "mlx", random_model(architecture), FOUR, "bf16")
    first, _ = load_mlx(tmp_path / "mlx")
    first.save_pretrained(tmp_path / "hf")
    second = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert same_bytes(first, second) and torch.equal(logits(first), logits(second))
    save_mlx(second, None, tmp_path / "again")
    assert same_tensors(read(tmp_path / "again"), tensors)


def test_models_of_quantize(tmp_path: Path) -> None:
    """What quantize_ made is a checkpoint that mlx-lm runs, dense formats and all."""
    model = quantize_(
        small_llama(), {"*mlp*": "affine3_g32", "lm_head": "f32", "*": "mxfp4"}, progress=False
    )
    save_mlx(model, None, tmp_path)
    want = mlx_logits(tmp_path)
    assert (logits(model) - want).abs().max() <= f32_error("llama", num_hidden_layers=1)


def test_formats_that_mlx_has_not(tmp_path: Path) -> None:
    model = quantize_(small_llama(), {"*.up_proj": "q4_k", "*": "affine4_g64"}, progress=False)
    with pytest.raises(ValueError, match=r"mlp.up_proj is q4_k, which MLX has not: quantize_"):
        save_mlx(model, None, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileExistsError, match="holds another model"):
        save_mlx(small_llama(), None, tmp_path)
    with pytest.raises(ValueError, match="must be a transformers model, got Linear"):
        save_mlx(torch.nn.Linear(3, 3), None, tmp_path / "x")

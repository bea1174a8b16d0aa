"""diffusers: transformers of image models pack while they load, are saved and loaded packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from hf_models import change_config, check_products, packed_bytes, same_bytes
from image_models import (
    IMAGES,
    image,
    noise,
    packed_transformer,
    pipeline,
    random_transformer,
    without,
)
from oracle import spec
from spoiled_folders import modules, stored, tensor
from torch import nn

from torch_metalmm import MetalMMConfig, QuantLinear, activations_, adopt_, fuse_, quantize_

WEIGHTS = "diffusion_pytorch_model.safetensors"
BOTH = pytest.mark.parametrize("name", IMAGES)
pytestmark = pytest.mark.filterwarnings("ignore:K is not a multiple")  # K = 64 of x_embedder


def dense_folder(name: str, folder: Path) -> Path:
    random_transformer(name).save_pretrained(folder / "dense")
    return folder / "dense"


def load(name: str, folder: Path, **options: Any) -> Any:
    return IMAGES[name][1].from_pretrained(folder, **options)


@BOTH
def test_a_pipeline_packs_its_transformer_and_loads_again(name: str, tmp_path: Path) -> None:
    dense, absent = pipeline(name), dict.fromkeys(without(name))
    dense.save_pretrained(tmp_path / "dense")
    config = diffusers.PipelineQuantizationConfig(
        quant_mapping={"transformer": MetalMMConfig("q8_0")}
    )
    packed = type(dense).from_pretrained(tmp_path / "dense", **absent, quantization_config=config)
    layers = {n for n, m in dense.transformer.named_modules() if type(m) is nn.Linear}
    assert packed_bytes(packed.transformer).keys() == layers
    packed.save_pretrained(tmp_path / "packed")
    loaded = type(dense).from_pretrained(tmp_path / "packed", **absent)
    assert same_bytes(loaded.transformer, packed.transformer)
    for dtype in (torch.float32, torch.bfloat16):
        given = image(loaded.to(dtype))
        assert given.dtype == dtype and given.isfinite().all()
        assert torch.equal(given, image(packed.to(dtype)))
    files = [tmp_path / kind / "transformer" / WEIGHTS for kind in ("packed", "dense")]
    assert files[0].stat().st_size < files[1].stat().st_size / 3  # 8.5 bits of 32


PACKED = ["transformer", "text_encoder"]


@pytest.mark.filterwarnings("ignore:left dense")  # of T5
def test_a_pipeline_packs_its_text_encoder_too(tmp_path: Path) -> None:
    config = diffusers.PipelineQuantizationConfig(
        quant_backend="metalmm", quant_kwargs={"format": "q8_0"}, components_to_quantize=PACKED
    )
    dense, absent = pipeline("flux"), dict.fromkeys(set(without("flux")) - {"text_encoder"})
    sizes = {"vocab_size": 64, "d_model": 256, "d_ff": 512, "d_kv": 64, "num_layers": 1}
    encoder = transformers.T5EncoderModel(transformers.T5Config(num_heads=4, **sizes)).eval()
    type(dense)(**dense.components | {"text_encoder": encoder}).save_pretrained(tmp_path / "dense")
    packed = type(dense).from_pretrained(tmp_path / "dense", **absent, quantization_config=config)
    packed.save_pretrained(tmp_path / "packed")
    loaded = type(dense).from_pretrained(tmp_path / "packed", **absent)
    for name in PACKED:
        ours, theirs = getattr(loaded, name), getattr(packed, name)
        assert len(packed_bytes(ours)) > 7 and same_bytes(ours, theirs)
    ids = torch.arange(8)[None]
    assert torch.equal(loaded.text_encoder(ids)[0], packed.text_encoder(ids)[0])
    assert torch.equal(image(loaded), image(packed))


@BOTH
@pytest.mark.parametrize("format", ["q8_0", "q4_k", "affine4_g64", "mxfp4"])
def test_from_pretrained_packs_as_quantize_does(name: str, format: str, tmp_path: Path) -> None:
    loaded = load(name, dense_folder(name, tmp_path), quantization_config=MetalMMConfig(format))
    want = packed_transformer(name, format)
    assert same_bytes(loaded, want) and torch.equal(noise(loaded), noise(want))
    want.save_pretrained(tmp_path / "packed")
    again = load(name, tmp_path / "packed")
    assert same_bytes(again, want) and torch.equal(noise(again), noise(want))
    kept = stored(tmp_path / "packed")
    assert kept["quant_method"] == "metalmm"
    assert kept["modules"] == {n: f for n, (f, _) in packed_bytes(want).items()}


@BOTH
def test_every_product_is_that_of_the_decoded_weights(name: str, tmp_path: Path) -> None:
    model = packed_transformer(name)
    packed = {
        n: (f, w, model.get_submodule(n).in_features) for n, (f, w) in packed_bytes(model).items()
    }
    assert check_products(model, lambda: noise(model)).keys() == packed.keys()
    dense = model.dequantize()
    assert packed_bytes(dense) == {} and "quantization_config" not in dense.config
    for layer, of in packed.items():
        assert type(dense.get_submodule(layer)) is nn.Linear
        assert torch.equal(dense.get_submodule(layer).weight, spec(*of))
    dense.save_pretrained(tmp_path)
    assert torch.equal(noise(load(name, tmp_path)), noise(dense))


def test_the_dtype_of_a_model_does_not_change_its_bytes(tmp_path: Path) -> None:
    folder = dense_folder("flux", tmp_path)
    model = load("flux", folder, dtype=torch.bfloat16, quantization_config=MetalMMConfig("q4_k"))
    assert same_bytes(model, packed_transformer("flux")) and model.dtype == torch.bfloat16
    assert model.to(torch.float16).x_embedder.bias.dtype == torch.float16
    assert same_bytes(model, packed_transformer("flux"))


def test_a_single_file_packs(tmp_path: Path) -> None:
    folder = dense_folder("sd3", tmp_path)
    model = diffusers.SD3Transformer2DModel.from_single_file(
        str(folder / WEIGHTS), config=str(folder), quantization_config=MetalMMConfig("q4_k")
    )
    assert same_bytes(model, packed_transformer("sd3"))
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(noise(load("sd3", tmp_path / "packed")), noise(model))


@BOTH
def test_parameters_are_those_of_the_dense_model(name: str) -> None:
    dense, packed, by_hand = (random_transformer(name) for _ in range(3))
    quantize_(packed, "q8_0", progress=False)
    by_hand.proj_out = QuantLinear.from_linear(by_hand.proj_out, "q4_k")
    for model in (packed, by_hand):
        for options in ({}, {"exclude_embeddings": True}):
            assert model.num_parameters(**options) == dense.num_parameters(**options)
    assert 0 < packed.num_parameters(only_trainable=True) < dense.num_parameters() / 100


@BOTH
def test_projections_that_were_fused_are_packed(name: str) -> None:
    model = random_transformer(name)
    model.fuse_qkv_projections()
    quantize_(model, {"*.to_qkv": "q4_k", "*.to_added_qkv": "q8_0"}, progress=False)
    assert check_products(model, lambda: noise(model)).keys() == packed_bytes(model).keys()


@BOTH
def test_dense_projections_beside_packed_layers_are_fused(name: str) -> None:
    model = packed_transformer(name, {"*.ff.*": "q4_k"})
    attention = model.transformer_blocks[0].attn
    separate = [getattr(attention, f"to_{part}").weight for part in "qkv"]
    model.fuse_qkv_projections()
    assert torch.equal(attention.to_qkv.weight, torch.cat(separate))


# ---- refused


@pytest.mark.parametrize(
    "change", [lambda p: quantize_(p, "q8_0"), lambda p: activations_(p, None), adopt_, fuse_]
)
def test_a_pipeline_is_no_model(change: Any) -> None:
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got FluxPipeline"):
        change(pipeline("flux"))


@BOTH
def test_packed_projections_are_not_fused(name: str) -> None:
    model = packed_transformer(name, {"*.attn.*": "q4_k"})
    layers, alone = [n for n, _ in model.named_modules()], noise(model)
    with pytest.raises(ValueError, match=r"to_q is packed in q4_k, and packed .* fuse the dense"):
        model.fuse_qkv_projections()
    assert [n for n, _ in model.named_modules()] == layers and torch.equal(noise(model), alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization_config": MetalMMConfig("q8_0", importance="x")}, "importance is read by"),
        ({"quantization_config": MetalMMConfig("q8_0", skip=["head"])}, "no module named 'head'"),
        (
            {
                "quantization_config": MetalMMConfig("q8_0"),
                "device_map": {"x_embedder": "disk", "": "cpu"},
            },
            "cannot be packed: save a packed",
        ),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load("flux", dense_folder("flux", tmp_path), **options)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (modules(extra="q4_k"), "the model has no layer extra"),
        (modules(proj_out="q8_0"), r"proj_out.weight must be U8 \[64, 272\]"),
        (modules(x_embedder="q4_k"), "x_embedder has K = 64, no q4_k row"),
        (modules(norm_out="q4_k"), "norm_out, a .* cannot be packed"),
        (tensor("proj_out.weight", None, WEIGHTS), "no tensor for the packed proj_out"),
        (
            tensor("proj_out.bias", torch.Tensor.int, WEIGHTS),
            "proj_out.bias is I32",
        ),
    ],
)
def test_damaged_files(damage: Any, message: str, tmp_path: Path) -> None:
    packed_transformer("flux").save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load("flux", tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int32])
def test_files_of_other_numbers_are_not_packed(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = dense_folder("flux", tmp_path)
    tensor("proj_out.weight", lambda t: t.to(dtype), WEIGHTS)(folder)
    config = MetalMMConfig("q8_0")
    for given in (
        lambda: load("flux", folder, quantization_config=config),
        lambda: diffusers.FluxTransformer2DModel.from_single_file(
            str(folder / WEIGHTS), config=str(folder), quantization_config=config
        ),
    ):
        with pytest.raises(ValueError, match=f"proj_out.weight is {dtype} .* packed are torch.fl"):
            given()


def test_a_packed_file_without_its_config(tmp_path: Path) -> None:
    packed_transformer("flux", "q8_0").save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=...)
    with pytest.raises(ValueError, match="is torch.uint8 .* from its folder and with its config"):
        load("flux", tmp_path, quantization_config=MetalMMConfig("q8_0"))


def test_dense_files_without_a_weight(tmp_path: Path) -> None:
    folder = dense_folder("flux", tmp_path)
    tensor("proj_out.weight", None, WEIGHTS)(folder)
    with pytest.raises(ValueError, match="no tensor for proj_out.weight, which is to be packed"):
        load("flux", folder, quantization_config=MetalMMConfig("q8_0"))


def test_formats_by_name_and_layers_left_dense(tmp_path: Path) -> None:
    config = MetalMMConfig("q8_0", modules={"*.attn.*": "q4_0"}, skip=["x_embedder", "norm_out"])
    model = load("flux", dense_folder("flux", tmp_path), quantization_config=config)
    assert type(model.x_embedder) is nn.Linear and type(model.norm_out.linear) is nn.Linear
    assert model.transformer_blocks[0].attn.to_q.format == "q4_0"
    assert model.proj_out.format == "q8_0"
    activations_(model, "int8")
    model.save_pretrained(tmp_path / "packed")
    loaded = load("flux", tmp_path / "packed")
    assert same_bytes(loaded, model) and loaded.proj_out.activations == "int8"
    assert torch.equal(noise(loaded), noise(model))

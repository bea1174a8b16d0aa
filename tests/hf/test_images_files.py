"""Files of packed models of diffusers: what a save writes, replaces and refuses; GGUF checkpoints,
which stay packed: adopt_ takes their bytes over, and they can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from gguf_files import write_gguf
from hf_models import check_products, packed_bytes, same_bytes
from image_models import IMAGES, noise, packed_transformer, random_transformer
from torch import nn

from torch_metalmm import MetalMMConfig, QuantLinear, adopt_
from torch_metalmm.hf.config import stored_config

WEIGHTS = "diffusion_pytorch_model.safetensors"
load = diffusers.FluxTransformer2DModel.from_pretrained


def test_shards_of_an_earlier_save_are_gone(tmp_path: Path) -> None:
    model = packed_transformer("flux")
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    assert (tmp_path / f"{WEIGHTS}.index.json").exists()
    assert same_bytes(load(tmp_path), model)
    model.save_pretrained(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {WEIGHTS, "config.json"}
    assert same_bytes(load(tmp_path), model)


def test_a_model_whose_packed_layers_are_dense_again(tmp_path: Path) -> None:
    model = packed_transformer("flux", {"proj_out": "q8_0"})
    model.proj_out = random_transformer("flux").proj_out
    model.save_pretrained(tmp_path)
    assert torch.equal(noise(load(tmp_path)), noise(random_transformer("flux")))


# ---- refused


def test_dense_weights_stay_readable(tmp_path: Path) -> None:
    """Also those of another variant: all of a folder have one config.json."""
    dense, packed = random_transformer("flux"), packed_transformer("flux")
    dense.save_pretrained(tmp_path)
    for variant in (None, "fp16"):
        with pytest.raises(FileExistsError, match=f"{WEIGHTS}: .* weights that are not packed"):
            packed.save_pretrained(tmp_path, variant=variant)
    assert torch.equal(noise(load(tmp_path)), noise(dense))
    packed.save_pretrained(tmp_path / "packed")
    packed.save_pretrained(tmp_path / "packed", variant="fp16")
    for variant in (None, "fp16"):
        assert same_bytes(load(tmp_path / "packed", variant=variant), packed)


def linear() -> QuantLinear:
    return QuantLinear.from_linear(nn.Linear(256, 3), "q8_0")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda m: setattr(m, "proj_out", linear()), {}, "proj_out .* has 64 rows of 256"),
        (lambda m: setattr(m, "extra", linear()), {}, "extra .* no layer that can be packed"),
        (lambda m: setattr(m, "hf_quantizer", Path()), {}, "quantized by PosixPath, too"),
        (id, {"safe_serialization": False}, "as safetensors only"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    change: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = packed_transformer("flux")
    change(model)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path / "packed", **options)
    assert not (tmp_path / "packed").exists()


BOTH = pytest.mark.parametrize("name", IMAGES)


def packed_model(name: str) -> Any:
    return packed_transformer(name, {"*.attn.*": "q6_k", "*": "q4_k"})


def written(model: Any, folder: Path) -> dict[str, str]:
    """Writes the model as a GGUF file of diffusers' names; how from_single_file reads it."""
    random_transformer(next(n for n in IMAGES if type(model) is IMAGES[n][1])).save_config(
        folder / "config"
    )
    formats = {f"{name}.weight": format for name, (format, _) in packed_bytes(model).items()}
    tensors = {
        name: (tensor.contiguous().numpy(), formats.get(name, "f32"))
        for name, tensor in model.state_dict().items()
    }
    write_gguf(folder / "model.gguf", "flux", tensors, tokenizer=False)
    return {
        "pretrained_model_link_or_path_or_dict": str(folder / "model.gguf"),
        "config": str(folder / "config"),
    }


@BOTH
def test_adopt_keeps_the_bytes_of_the_file(name: str, tmp_path: Path) -> None:
    want = packed_model(name)
    model = IMAGES[name][1].from_single_file(
        **written(want, tmp_path),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "packed")
    places = {n: m.weight.data_ptr() for n, m in model.named_modules() if hasattr(m, "source_cls")}
    adopt_(model)
    assert places == {
        n: m.weight.data_ptr() for n, m in model.named_modules() if isinstance(m, QuantLinear)
    }
    assert same_bytes(model, want)
    assert check_products(model, lambda: noise(model)).keys() == packed_bytes(want).keys()
    model.save_pretrained(tmp_path / "packed")
    loaded = IMAGES[name][1].from_pretrained(tmp_path / "packed")
    assert same_bytes(loaded, want) and torch.equal(noise(loaded), noise(model))


def test_layers_that_are_left_keep_the_model_theirs(tmp_path: Path) -> None:
    model = diffusers.FluxTransformer2DModel.from_single_file(
        **written(packed_model("flux"), tmp_path),
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
    )
    adopt_(model, lambda name, module: name != "proj_out")
    config = stored_config(model)
    assert config is not None and "proj_out" not in config.modules
    with pytest.raises(ValueError, match="proj_out could not be saved: it is a GGUFLinear"):
        model.save_pretrained(tmp_path / "packed")


def test_metalmm_config_says_what_reads_a_gguf_file(tmp_path: Path) -> None:
    given = written(packed_model("flux"), tmp_path)
    with pytest.raises(ValueError, match=r"give GGUFQuantizationConfig, and .*adopt_\(model\)"):
        diffusers.FluxTransformer2DModel.from_single_file(
            **given, quantization_config=MetalMMConfig("q8_0")
        )

"""Folders of packed models of diffusers: what a save writes, replaces and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hf_models import packed_bytes, same_bytes
from image_models import noise, packed_transformer, random_transformer
from torch import nn

from torch_metalmm import QuantLinear, quantize_

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


def test_another_model_of_diffusers(tmp_path: Path) -> None:
    model = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    name = next(n for n, m in model.named_modules() if type(m) is nn.Linear)
    quantize_(model, {name: "q8_0"}, progress=False)
    model.save_pretrained(tmp_path)
    loaded = diffusers.AutoencoderKL.from_pretrained(tmp_path)
    assert packed_bytes(loaded).keys() == {name} and same_bytes(loaded, model)


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

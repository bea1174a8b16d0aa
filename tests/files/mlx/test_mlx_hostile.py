"""load_mlx on checkpoints that lie, lack something or want code to run: only a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import spoiled_folders
import torch
from hf_models import random_model
from spoiled_folders import UP, Spoil, both, config, raw, refused, tensor, up

from torch_metalmm import load_mlx

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm.utils")
from mlx_files import write  # noqa: E402


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint: 4 bits in groups of 64."""
    folder = tmp_path_factory.mktemp("good")
    write(folder, random_model("llama", num_hidden_layers=1), {"group_size": 64, "bits": 4})
    return folder


folder = spoiled_folders.folder  # a copy of `good`


def quantization(**changes: Any) -> Spoil:
    values = {"group_size": 64, "bits": 4} | changes
    return config(quantization=values, quantization_config=values)


def twice(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


CASES: dict[str, tuple[Spoil, str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no model\*.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object"),
    "no model_type": (config(model_type=...), "no model_type None"),
    "model_type is a list": (config(model_type=["llama"]), r"no model_type \['llama'\]"),
    "unknown model_type": (config(model_type="evil"), "no model_type 'evil'"),
    "its own code": (config(model_file="evil.py"), "needs its own code, 'evil.py', which is not"),
    "another quantizer": (quantization(quant_method="awq"), "quantized by 'awq', not in a mode"),
    "other numbers": (config(model_type="falcon_h1"), "not loaded from MLX, where projections"),
    "strange sizes": (config(num_attention_heads="x"), "transformers makes no config of it"),
    "quantization is a list": (config(quantization=[1]), r"quantization must be an object, got"),
    "no quantization": (
        config(quantization=..., quantization_config=...),
        "has scales, but config.json no quantization",
    ),
    "mode nvfp8": (quantization(mode="nvfp8"), "the mode 'nvfp8' is not supported"),
    "mode of a layer": (quantization(**{UP: {"mode": "mxfp6"}}), "up_proj'.: the mode 'mxfp6'"),
    "bits is text": (quantization(bits="4"), "bits must be a positive integer, got '4'"),
    "bits is true": (quantization(bits=True), "bits must be a positive integer, got True"),
    "group is negative": (quantization(group_size=-64), "group_size must be a positive integer"),
    "a layer is a number": (quantization(**{UP: 4}), "must be an object, true or false, got 4"),
    "other bits": (
        quantization(**{UP: {"bits": 8, "group_size": 64}}),
        r"up_proj: the config says .*bits=8.*, its tensors have .*bits=4",
    ),
    "huge group": (
        quantization(**{UP: {"bits": 4, "group_size": 2**40}}),
        r"up_proj: the config says .*group_size=1099511627776",
    ),
    "dense, but scales": (quantization(**{UP: False}), "has scales, but the config leaves it"),
    "scales missing": (
        both(quantization(**{UP: {"bits": 4, "group_size": 64}}), up("scales", None)),
        "up_proj.scales is missing",
    ),
    "scales missing, unnamed": (
        both(up("scales", None), up("biases", None)),
        r"up_proj.weight is \[512, 32\], the model has \[512, 256\]",
    ),
    "biases missing": (up("biases", None), "up_proj: biases are missing"),
    "codes missing": (up("weight", None), "up_proj.weight is missing"),
    "layer missing": (
        tensor("model.norm.weight", None),
        "has no tensor for model.norm.weight",
    ),
    "codes of another dtype": (up("weight", lambda t: t.to(torch.int32)), "must be uint32"),
    "codes with three dims": (up("weight", lambda t: t[None]), r"got torch.uint32 \[1, 512, 32\]"),
    "codes of other rows": (up("weight", lambda t: t[:-1]), r"\[511, 32\], the model has 512 rows"),
    "codes too short": (up("weight", lambda t: t[:, :-1]), "are no rows of 256 inputs"),
    "codes empty": (up("weight", lambda t: t[:, :0]), "no format here|are no rows"),
    "codes of 7 bits": (
        up("weight", lambda t: torch.zeros(512, 56, dtype=torch.uint32)),
        "affine, 7 bits, groups of 64, .* has no format here",
    ),
    "scales of 16": (up("scales", lambda t: torch.zeros(512, 16).half()), "groups of 16"),
    "one group": (up("scales", lambda t: t[:, :1]), "affine, 4 bits, groups of 256"),
    "no groups": (up("scales", lambda t: t[:, :0]), "are no rows of 256 inputs"),
    "ragged groups": (up("scales", lambda t: t[:, :3]), "are no rows of 256 inputs"),
    "scales of other rows": (up("scales", lambda t: t[:-1]), "scales must be torch.float16"),
    "scales of another dtype": (up("scales", lambda t: t.to(torch.uint8)), "has no format here"),
    "mixed dtypes": (up("biases", lambda t: t.float()), "biases must be torch.float16"),
    "biases of other shape": (up("biases", lambda t: t[:, :-1]), "biases must be torch.float16"),
    "norm of other shape": (
        tensor("model.norm.weight", lambda t: t[:-1]),
        r"model.norm.weight is \[255\], the model has \[256\]",
    ),
    "extra tensor": (tensor("evil.weight", lambda t: torch.zeros(3)), "does not: evil.weight"),
    "extra layer": (
        both(
            tensor("evil.weight", lambda t: torch.zeros(4, 8, dtype=torch.uint32)),
            tensor("evil.scales", lambda t: torch.zeros(4, 1)),
        ),
        "the model has no layer evil",
    ),
    "a norm with scales": (
        tensor("model.norm.scales", lambda t: torch.zeros(4, 1)),
        "model.norm is a LlamaRMSNorm, which cannot be packed",
    ),
    "truncated": (raw(lambda data: data[:-9]), "cannot read .*model.safetensors"),
    "long header": (
        raw(lambda data: (2**62).to_bytes(8, "little") + data[8:]),
        "cannot read .*model.safetensors",
    ),
    "not safetensors": (
        raw(lambda data: b"\x80\x04pickle"),
        "cannot read .*model.safetensors",
    ),
    "a tensor twice": (twice, "is in .*model-2.safetensors and in .*model.safetensors"),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_checkpoints(folder: Path, case: str) -> None:
    refused(load_mlx, folder, *CASES[case])


def test_an_mxfp4_scale_that_is_nan(tmp_path: Path) -> None:
    sizes = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    write(tmp_path, random_model("llama", num_hidden_layers=1), sizes)
    up("scales", lambda t: torch.full_like(t, 255))(tmp_path)
    with pytest.raises(ValueError, match="up_proj: mxfp4: a scale is NaN"):
        load_mlx(tmp_path)
    up("scales", lambda t: torch.full_like(t, 120))(tmp_path)
    up("biases", lambda t: torch.zeros(512, 8))(tmp_path)
    with pytest.raises(ValueError, match="up_proj: mxfp4 has no biases"):
        load_mlx(tmp_path)


def test_code_beside_the_weights_is_not_run(folder: Path) -> None:
    """auto_map names a class of a file in the folder; only trust_remote_code would run it."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config(auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"})
    )
    with pytest.raises(Exception, match="trust_remote_code|tokenizer"):
        load_mlx(folder)
    assert not (folder / "ran").exists()
    (folder / "tokenizer_config.json").unlink()
    load_mlx(folder)
    assert not (folder / "ran").exists()

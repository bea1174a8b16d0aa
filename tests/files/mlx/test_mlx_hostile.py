"""load_mlx on checkpoints that lie, lack something or want code to run: only a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import random_model

from torch_metalmm import load_mlx

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm.utils")
from mlx_files import read, write  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("error")]

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint: 4 bits in groups of 64."""
    write(tmp_path, random_model("llama", num_hidden_layers=1), {"group_size": 64, "bits": 4})
    return tmp_path


def config(**changes: Any) -> Callable[[Path], None]:
    """Change entries of config.json; ... removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        kept = {k: v for k, v in values.items() if v is not ...}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def quantization(**changes: Any) -> Callable[[Path], None]:
    values = {"group_size": 64, "bits": 4} | changes
    return config(quantization=values, quantization_config=values)


def tensors(**changes: Any) -> Callable[[Path], None]:
    """Replace tensors by f(tensor), or remove them where f is None; __ in a name is a dot."""

    def change(folder: Path) -> None:
        all_tensors = read(folder)
        for name, f in changes.items():
            key = name.replace("__", ".")
            old = all_tensors.pop(key, None)
            if f is not None:
                all_tensors[key] = f(old)
        mx.save_safetensors(str(folder / "model.safetensors"), all_tensors)

    return change


def up(leaf: str, f: Any) -> Callable[[Path], None]:
    return tensors(**{f"{UP}.{leaf}".replace(".", "__"): f})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def long_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])


def twice(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no model\*.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object"),
    "no model_type": (config(model_type=...), "no model_type None"),
    "model_type is a list": (config(model_type=["llama"]), r"no model_type \['llama'\]"),
    "unknown model_type": (config(model_type="evil"), "no model_type 'evil'"),
    "its own code": (config(model_file="evil.py"), "needs its own code, 'evil.py', which is not"),
    "another quantizer": (quantization(quant_method="awq"), "quantized by 'awq', not in a mode"),
    "other numbers": (config(model_type="qwen3_next"), "not loaded from MLX, where 1 is added"),
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
        lambda f: (quantization(**{UP: {"bits": 4, "group_size": 64}})(f), up("scales", None)(f)),
        "up_proj.scales is missing",
    ),
    "scales missing, unnamed": (
        lambda f: (up("scales", None)(f), up("biases", None)(f)),
        r"up_proj.weight is \[512, 32\], the model has \[512, 256\]",
    ),
    "biases missing": (up("biases", None), "up_proj: biases are missing"),
    "codes missing": (up("weight", None), "up_proj.weight is missing"),
    "layer missing": (
        tensors(model__norm__weight=None),
        "has no tensor for model.norm.weight",
    ),
    "codes of another dtype": (up("weight", lambda t: t.astype(mx.int32)), "must be uint32"),
    "codes with three dims": (up("weight", lambda t: t[None]), r"got torch.uint32 \[1, 512, 32\]"),
    "codes of other rows": (up("weight", lambda t: t[:-1]), r"\[511, 32\], the model has 512 rows"),
    "codes too short": (up("weight", lambda t: t[:, :-1]), "are no rows of 256 inputs"),
    "codes empty": (up("weight", lambda t: t[:, :0]), "no format here|are no rows"),
    "codes of 7 bits": (
        up("weight", lambda t: mx.zeros((512, 56), dtype=mx.uint32)),
        "affine, 7 bits, groups of 64, .* has no format here",
    ),
    "scales of 16": (up("scales", lambda t: mx.zeros((512, 16), mx.float16)), "groups of 16"),
    "one group": (up("scales", lambda t: t[:, :1]), "affine, 4 bits, groups of 256"),
    "no groups": (up("scales", lambda t: t[:, :0]), "are no rows of 256 inputs"),
    "ragged groups": (up("scales", lambda t: t[:, :3]), "are no rows of 256 inputs"),
    "scales of other rows": (up("scales", lambda t: t[:-1]), "scales must be torch.float16"),
    "scales of another dtype": (up("scales", lambda t: t.astype(mx.uint8)), "has no format here"),
    "mixed dtypes": (up("biases", lambda t: t.astype(mx.float32)), "biases must be torch.float16"),
    "biases of other shape": (up("biases", lambda t: t[:, :-1]), "biases must be torch.float16"),
    "norm of other shape": (
        tensors(model__norm__weight=lambda t: t[:-1]),
        r"model.norm.weight is \[255\], the model has \[256\]",
    ),
    "extra tensor": (tensors(evil__weight=lambda t: mx.zeros(3)), "does not: evil.weight"),
    "extra layer": (
        tensors(
            evil__weight=lambda t: mx.zeros((4, 8), dtype=mx.uint32),
            evil__scales=lambda t: mx.zeros((4, 1)),
        ),
        "the model has no layer evil",
    ),
    "a norm with scales": (
        tensors(model__norm__scales=lambda t: mx.zeros((4, 1))),
        "model.norm is a LlamaRMSNorm, which cannot be packed",
    ),
    "truncated": (truncate, "cannot read .*model.safetensors"),
    "long header": (long_header, "cannot read .*model.safetensors"),
    "not safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04pickle"),
        "cannot read .*model.safetensors",
    ),
    "a tensor twice": (twice, "is in .*model-2.safetensors and in .*model.safetensors"),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_checkpoints(folder: Path, case: str) -> None:
    spoil, message = CASES[case]
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load_mlx(folder)
    assert str(folder) in str(caught.value)


def test_an_mxfp4_scale_that_is_nan(tmp_path: Path) -> None:
    sizes = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    write(tmp_path, random_model("llama", num_hidden_layers=1), sizes)
    up("scales", lambda t: mx.full(t.shape, 255, dtype=mx.uint8))(tmp_path)
    with pytest.raises(ValueError, match="up_proj: mxfp4: a scale is NaN"):
        load_mlx(tmp_path)
    up("scales", lambda t: mx.full(t.shape, 120, dtype=mx.uint8))(tmp_path)
    up("biases", lambda t: mx.zeros((512, 8)))(tmp_path)
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

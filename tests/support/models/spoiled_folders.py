"""A good packed folder, copies of it to spoil, and ways to do it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import change_config, random_model
from safetensors.torch import load_file, save_file

from torch_metalmm import quantize_

UP = "model.layers.0.mlp.up_proj"
Spoil = Callable[[Path], object]


def small_llama() -> Any:
    return random_model("llama", num_hidden_layers=1)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    model = quantize_(small_llama(), {"lm_head": None, "*": "q8_0"}, progress=False)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A good packed model: q8_0, a dense head."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def stored(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def config(**changes: Any) -> Spoil:
    """Change entries of config.json."""
    return lambda folder: change_config(folder, **changes)


def quant(**changes: Any) -> Spoil:
    """Change entries of quantization_config."""
    return lambda folder: change_config(folder, quantization_config=stored(folder) | changes)


def modules(**changes: Any) -> Spoil:
    """Change entries of quantization_config's modules; __ in a name is a dot."""
    new = {k.replace("__", "."): v for k, v in changes.items()}
    return lambda folder: quant(modules=stored(folder)["modules"] | new)(folder)


def tensor(
    name: str,
    f: Callable[[torch.Tensor], torch.Tensor] | None,
    weights: str = "model.safetensors",
) -> Spoil:
    """Replace a tensor of the file by f(tensor), or remove it."""

    def change(folder: Path) -> None:
        file = folder / weights
        tensors = {n: t.clone() for n, t in load_file(file).items()}
        old = tensors.pop(name, torch.zeros(3))
        if f is not None:
            tensors[name] = f(old).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def up(leaf: str, f: Callable[[torch.Tensor], torch.Tensor] | None) -> Spoil:
    """Replace a tensor of up_proj [512, 256] by f(tensor), or remove it."""
    return tensor(f"{UP}.{leaf}", f)


def raw(f: Callable[[bytes], bytes]) -> Spoil:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(f(file.read_bytes()))

    return change


def refused(load: Callable[[Path], object], folder: Path, spoil: Spoil, message: str) -> None:
    """The spoiled folder is not loaded; the error says why, and where."""
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]

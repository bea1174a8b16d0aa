"""A good packed folder, copies of it to spoil, and ways to do it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import random_model
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


def config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; ... removes one."""
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {k: v for k, v in values.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def quant(**changes: Any) -> Spoil:
    """Change entries of quantization_config."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
        config(folder, quantization_config={k: v for k, v in old.items() if v is not ...})

    return change


def modules(**changes: Any) -> Spoil:
    """Change entries of quantization_config's modules; __ in a name is a dot."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
        new = old | {k.replace("__", "."): v for k, v in changes.items()}
        quant(modules={k: v for k, v in new.items() if v is not ...})(folder)

    return change


def tensor(name: str, f: Callable[[torch.Tensor], torch.Tensor] | None) -> Spoil:
    """Replace a tensor of the file by f(tensor), or remove it."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = {n: t.clone() for n, t in load_file(file).items()}
        old = tensors.pop(name, torch.zeros(3))
        if f is not None:
            tensors[name] = f(old).contiguous()
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def raw(f: Callable[[bytes], bytes]) -> Spoil:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(f(file.read_bytes()))

    return change


def both(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]

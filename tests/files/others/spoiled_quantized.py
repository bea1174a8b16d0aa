"""Changes of a folder of quantized_files that a loader refuses: of config, tensors and files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantized_files import change_config, layouts, random_layer
from safetensors.torch import load_file, save_file
from torch import Tensor

UP = "model.layers.0.mlp.up_proj"  # [512, 256]
Change = Callable[[Path], None]


def says(**changes: Any) -> Change:
    """Change entries of quantization_config."""

    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())["quantization_config"]
        change_config(folder, quantization_config=values | changes)

    return change


def up(leaf: str, change: Any) -> Change:
    """Replace a tensor of up_proj by change(tensor); None removes it."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        old = tensors.pop(f"{UP}.{leaf}", None)
        if change is not None:
            tensors[f"{UP}.{leaf}"] = change(old).contiguous()
        save_file(tensors, folder / "model.safetensors")

    return apply


def every(leaf: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Replace this tensor of every layer."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith(leaf):
                tensors[name] = change(tensor).contiguous()
        save_file(tensors, folder / "model.safetensors")

    return apply


def several(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def config(**changes: Any) -> Change:
    return lambda folder: change_config(folder, **changes)


def rename(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        named = {name.replace(old, new): t for name, t in tensors.items()}
        save_file(named, folder / "model.safetensors")

    return change


def tied_head(folder: Path) -> None:
    """A quantized head [320, 256] of a model whose head is its embedding."""
    head = layouts(4, 64)["gptq"].tensors(random_layer(320, 256, 4, 64))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"lm_head.{leaf}": t for leaf, t in head.items()}
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, tie_word_embeddings=True)


def copied(*names: str) -> Change:
    """Other files of the same weights."""

    def change(folder: Path) -> None:
        for name in names:
            shutil.copy(folder / "model.safetensors", folder / name)

    return change


def of_other_names(folder: Path) -> None:
    copied("a.safetensors", "b.safetensors")(folder)
    (folder / "model.safetensors").unlink()


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def grouped(**changes: Any) -> Change:
    return says(config_groups={"group_0": {"weights": {"num_bits": 4}} | changes})


def weights(**changes: Any) -> Change:
    stated = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    return grouped(weights=stated | changes)

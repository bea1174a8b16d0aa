"""Changes of a folder of quantized_files that a loader refuses: of config, tensors and files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantized_files import change_config, layouts, random_layer
from safetensors.torch import load_file, save_file
from spoiled_folders import Spoil, quant
from torch import Tensor


def every(leaf: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    """Replace this tensor of every layer."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, value in tensors.items():
            if name.endswith(leaf):
                tensors[name] = change(value).contiguous()
        save_file(tensors, folder / "model.safetensors")

    return apply


def rename(old: str, new: str) -> Spoil:
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


def copied(*names: str) -> Spoil:
    """Other files of the same weights."""

    def change(folder: Path) -> None:
        for name in names:
            shutil.copy(folder / "model.safetensors", folder / name)

    return change


def of_other_names(folder: Path) -> None:
    copied("a.safetensors", "b.safetensors")(folder)
    (folder / "model.safetensors").unlink()


def grouped(**changes: Any) -> Spoil:
    return quant(config_groups={"group_0": {"weights": {"num_bits": 4}} | changes})


def weights(**changes: Any) -> Spoil:
    stated = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    return grouped(weights=stated | changes)

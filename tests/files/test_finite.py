"""Files whose packed weights decode to Inf or NaN."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import random_model

from bench.models.families import new_model, sizes
from torch_metalmm import load_gguf, load_mlx, load_packed, quantize_, save_mlx, save_packed
from torch_metalmm.files.gguf.file import GgufFile
from torch_metalmm.models import finite

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("save", "load", "format", "scale", "at"),
    [
        (save_packed, load_packed, "q4_0", torch.tensor(-torch.inf).half(), 0),
        (save_mlx, load_mlx, "affine4_g32_bf16", torch.tensor(1e38).bfloat16(), 128),
    ],
    ids=["packed", "mlx"],
)
def test_a_scale_that_makes_inf_is_named(
    tmp_path: Path,
    save: Callable[..., Any],
    load: Callable[..., Any],
    format: str,
    scale: torch.Tensor,
    at: int,
) -> None:
    model = quantize_(new_model("llama", sizes(256, 256, 64)), format, progress=False)
    path = tmp_path
    rows = model.get_parameter(LAYER).data
    rows[5, at : at + 2] = scale.reshape(1).view(torch.uint8)
    decoded = torch.ops.metalmm.dequantize(rows, format)[5]
    assert not decoded.isfinite().all()
    save(model, None, path)
    with pytest.raises(ValueError, match=rf"{path}: {LAYER} has (-?inf|nan) in row 5"):
        load(path)


def spoil(path: Path, scale: int) -> None:
    """Write an f16, by its bits, to the first scale of row 5 of a tensor."""
    entry = GgufFile(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(entry.offset + 5 * entry.nbytes // entry.shape[0])
        file.write(scale.to_bytes(2, "little"))


@pytest.mark.parametrize("scale", [0x7C00, 0x7E01], ids=["inf", "nan"])
def test_a_scale_of_a_gguf_file_is_named(tmp_path: Path, scale: int) -> None:
    path = random_model(tmp_path / "model.gguf", "llama", kinds=("q8_0",))
    spoil(path, scale)
    with pytest.raises(ValueError, match=rf"{path}: {LAYER} has (-?inf|nan) in row 5"):
        load_gguf(path)


def test_files_beyond_half_of_memory_stay_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_model(tmp_path / "model.gguf", "llama", kinds=("q8_0",))
    spoil(path, 0x7C00)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1}.__getitem__)
    load_gguf(path)


def test_the_check_takes_one_thread_and_gives_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait by spinning made its cost vary by 10."""
    seen, sums = [], finite._sums

    def recorded(weight: torch.Tensor, kind: str) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return sums(weight, kind)

    monkeypatch.setattr(finite, "_sums", recorded)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load_gguf(random_model(tmp_path / "model.gguf", "llama"))
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

"""Models with experts are not sharded: shard_ and every way to load with a mesh say so by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expert_models import expert_model
from ranks import on_ranks
from test_shard_files import write_model

from torch_metalmm import (
    MetalMMConfig,
    load_gguf,
    load_mlx,
    load_packed,
    quantize_,
    save_mlx,
    save_packed,
    shard_,
)

SAID = "experts are not sharded yet: model.layers.0.mlp.experts"
WAYS = ("shard_", "dense", "packed", "gguf", "mlx", "config")


def mixture() -> Any:
    return expert_model(norm_topk_prob=True)  # what readers of a GGUF file take it to be


def write(folder: Path) -> None:
    """A mixture as it is read by each loader."""
    mixture().save_pretrained(folder / "dense")
    save_packed(quantize_(mixture(), "q4_0", progress=False), None, folder / "packed")
    save_mlx(quantize_(mixture(), "affine4_g32", progress=False), None, folder / "mlx")
    write_model(quantize_(mixture(), "q4_0", progress=False), folder)


def sharded(way: str, folder: Path, mesh: Any) -> None:
    if way == "shard_":
        shard_(quantize_(mixture(), "q4_0", progress=False), mesh)
    elif way == "dense":
        shard_(mixture(), mesh)
    elif way == "packed":
        load_packed(folder / "packed", mesh=mesh)
    elif way == "gguf":
        load_gguf(folder / "model.gguf", mesh=mesh)
    elif way == "mlx":
        load_mlx(folder / "mlx", mesh=mesh)
    else:
        from transformers import AutoModelForCausalLM

        config = MetalMMConfig("q4_0")
        AutoModelForCausalLM.from_pretrained(
            folder / "dense", quantization_config=config, tp_plan="auto"
        )


def refusals(mesh: Any, folder: Path) -> dict[str, str]:
    said = {}
    for way in WAYS:
        with pytest.raises(ValueError) as caught:
            sharded(way, folder, mesh)
        said[way] = str(caught.value)
    return said


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    for said in on_ranks(2, refusals, tmp_path):
        assert len(said) == len(WAYS)
        assert {way: text for way, text in said.items() if not text.endswith(SAID)} == {}

"""Models with experts are not sharded: shard_ and every way to load with a mesh say so by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expert_models import expert_model
from ranks import on_each_rank
from test_shard_files import KINDS, load, write

from torch_metalmm import quantize_, shard_


def mixture() -> Any:
    return expert_model(norm_topk_prob=True)  # what readers of a GGUF file take it to be


@pytest.mark.filterwarnings("ignore:K is not a multiple")
def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    for kind in KINDS:
        write(kind, tmp_path / kind, mixture())
    check_refused(folder=tmp_path)


@on_each_rank(2)
def check_refused(mesh: Any, folder: Path) -> None:
    ways = [lambda kind=kind: load(kind, folder / kind, mesh) for kind in KINDS]
    for model in (mixture(), quantize_(mixture(), "q4_0", progress=False)):
        ways.append(lambda model=model: shard_(model, mesh))
    for call in ways:
        with pytest.raises(ValueError, match="experts are not sharded yet: model.layers.0.mlp.exp"):
            call()

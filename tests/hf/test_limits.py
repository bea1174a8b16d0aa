"""The largest counts of a config that are built, and the first that are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torch_metalmm.files.limits import MAX_LAYERS, check_counts


@pytest.mark.parametrize(
    ("tensors", "key", "most"),
    [
        (1, "num_hidden_layers", 128),  # a model of few tensors may state a default
        (200, "num_hidden_layers", 200),
        (200, "encoder_layers", 200),
        (0, "num_hidden_layers", MAX_LAYERS),  # weights of another kind are not counted
        (1, "num_local_experts", MAX_LAYERS),
        (1, "num_labels", 2**20),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_counts(tensors: int, key: str, most: int, inside: bool, tmp_path: Path) -> None:
    if tensors:
        save_file({str(i): torch.zeros(1) for i in range(tensors)}, tmp_path / "model.safetensors")

    def config(count: int) -> dict[str, object]:
        return {"parts": [{"text_config": {key: count}}]} if inside else {key: count}

    check_counts(tmp_path, config(most))
    with pytest.raises(ValueError, match=f"config.json: {key} = {most + 1}, at most {most} are"):
        check_counts(tmp_path, config(most + 1))
    with pytest.raises(ValueError, match=f"{key} = a number of 70 bits, at most {most} are"):
        check_counts(tmp_path, config(2**69))

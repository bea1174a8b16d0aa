"""A rank that fails between two collectives: the others fail too, and do not wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from ranks import on_each_rank
from tiny_models import tiny_llama

from torch_metalmm import quantize_, save_packed, shard_
from torch_metalmm.nn.sharded import Shard

# For which part of a save there is no room: the rank, and what fails there.
FAILS: dict[str, tuple[int, Any, str]] = {
    "what is sent": (1, torch.Tensor, "flatten"),
    "what is received": (0, torch, "empty_like"),
    "the whole": (0, Shard, "join"),
    "the file": (0, transformers.modeling_utils, "safe_save_file"),
}


@pytest.mark.parametrize("what", FAILS)
@on_each_rank(2)
def test_a_save_that_fails_fails_on_every_rank(mesh: Any, what: str, tmp_path: Path) -> None:
    """And the next one does not."""
    rank, owner, name = FAILS[what]

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError(name)

    model = shard_(quantize_(tiny_llama(), "q4_0", progress=False), mesh)
    said = f"MemoryError: {name}"
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank() == rank:
            patch.setattr(owner, name, fail)
        else:
            said = f"RuntimeError: rank {rank} could not save: {said}"
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            save_packed(model, None, tmp_path / "saved")
    assert f"{type(caught.value).__name__}: {caught.value}" == said
    save_packed(model, None, tmp_path / "saved")

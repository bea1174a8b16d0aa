"""A rank that fails between two collectives: the others fail too, and do not wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, on_ranks
from tiny_models import tiny_llama

from torch_metalmm import quantize_, save_packed, shard_
from torch_metalmm.models.shard.gather import on_whole
from torch_metalmm.nn.sharded import Shard


def failing(mesh: Any, folder: Path) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no room")

    model = shard_(quantize_(tiny_llama(), "q4_0", progress=False), mesh)
    if mesh.get_local_rank() == 0:
        import transformers.modeling_utils as theirs

        theirs.safe_save_file = fail
    save_packed(model, None, folder)


def test_a_save_that_fails_fails_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        on_ranks(2, failing, tmp_path / "saved")
    assert "OSError: no room" in caught.value.errors[0]
    assert "RuntimeError: rank 0 could not save: OSError: no room" in caught.value.errors[1]


# For which tensor there is no memory: the rank, and what fails there.
GATHERED: dict[str, tuple[int, Any, str]] = {
    "what is sent": (1, torch.Tensor, "flatten"),
    "what is received": (0, torch, "empty_like"),
    "the whole": (0, Shard, "join"),
}


def without_memory(mesh: Any, what: str) -> list[str]:
    """What a save says while there is none, and what one says afterwards."""
    rank, owner, name = GATHERED[what]

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError(name)

    model = shard_(quantize_(tiny_llama(), "q4_0", progress=False), mesh)
    said = []
    for ranks in ((rank,), ()):
        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_local_rank() in ranks:
                patch.setattr(owner, name, fail)
            try:
                on_whole(model, lambda: None)
                said.append("nothing")
            except (MemoryError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("what", GATHERED)
def test_a_save_without_memory(what: str) -> None:
    rank, _, name = GATHERED[what]
    answers = on_ranks(2, without_memory, what)
    own = f"MemoryError: {name}"
    assert answers[rank] == [own, "nothing"]
    assert answers[1 - rank] == [f"RuntimeError: rank {rank} could not save: {own}", "nothing"]

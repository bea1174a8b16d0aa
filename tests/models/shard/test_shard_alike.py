"""What ranks must do alike, whatever each of them has and knows; where one fails between two
collectives, the others fail too and do not wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from hf_models import logits
from ranks import on_each_rank
from test_shard_models import RAGGED, built
from tiny_models import VOCABULARY, tiny_llama

from torch_metalmm import fuse_, quantize_, save_packed, shard_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.nn.sharded import Shard


@pytest.mark.parametrize("wrong", [VOCABULARY, -1], ids=["behind", "before"])
@on_each_rank(2)
def test_ids_of_no_rank(mesh: Any, wrong: int) -> None:
    """A rank that has none of them says what the others do, and what the whole table says."""
    model = quantize_(tiny_llama(), "q4_0", progress=False)
    said = f"ids: {wrong} is out of range; the table has {VOCABULARY} rows"
    for m in (model, shard_(model, mesh)):
        with pytest.raises(IndexError, match=said):
            m.get_input_embeddings()(torch.tensor([[3, wrong]]))


@on_each_rank(2)
def test_a_layer_that_one_rank_does_not_understand(mesh: Any) -> None:
    """To confirm a layer runs its sums: the rank that knows would wait for the other."""
    from torch_metalmm.models.fuse import layers
    from torch_metalmm.models.fuse.runs import Unknown

    understood, calls = layers.recipe_of, []

    def recipe_of(layer: Any, *args: Any) -> Any:
        if layer not in calls:
            calls.append(layer)
        if mesh.get_local_rank() == 1 and len(calls) == 1:
            raise Unknown("this rank does not know")
        return understood(layer, *args)

    model = shard_(built("qwen3", "q8_0", **RAGGED["blocks"]), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "recipe_of", recipe_of)
        fuse_(model, "swiglu")
    assert logits(model).isfinite().all()
    assert len(calls) == 2
    assert [fused_layer(layer) is not None for layer in model.model.layers] == [False, True]


@on_each_rank(2)
def test_the_rows_of_a_table_are_those_of_all_ranks(mesh: Any) -> None:
    whole = quantize_(tiny_llama(), "q4_0", progress=False)
    count = whole.num_parameters()
    model = shard_(whole, mesh)
    assert model.num_parameters() == count
    assert fuse_(model).num_parameters() == count
    table = model.get_input_embeddings()
    assert model.resize_token_embeddings(VOCABULARY) is table
    said = f"the RowsEmbedding has {VOCABULARY} rows packed in q4_0, which cannot be"
    with pytest.raises(ValueError, match=said):
        model.resize_token_embeddings(VOCABULARY // 2)  # the rows of a rank


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

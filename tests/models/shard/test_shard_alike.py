"""What ranks must do alike, whatever each of them has and knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import logits
from ranks import on_ranks
from test_shard_models import RAGGED, built
from tiny_models import VOCABULARY, tiny_llama
from torch import Tensor

from torch_metalmm import fuse_, quantize_, shard_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.nn.fused import SwiGLU


def wrong_ids(mesh: Any, ids: list[int]) -> list[str]:
    """What the whole table says, and the sharded one."""
    said = []
    model = quantize_(tiny_llama(), "q4_0", progress=False)
    for m in (model, shard_(model, mesh)):
        with pytest.raises(IndexError) as caught:
            m.get_input_embeddings()(torch.tensor([ids]))
        said.append(str(caught.value).splitlines()[0])
    return said


@pytest.mark.parametrize("ids", [[3, VOCABULARY], [-1, 3]], ids=["behind", "before"])
def test_ids_of_no_rank(ids: list[int]) -> None:
    wrong = next(i for i in ids if i != 3)
    said = f"ids: {wrong} is out of range; the table has {VOCABULARY} rows"
    assert on_ranks(2, wrong_ids, ids) == [[said, said]] * 2


def fused_untimed(mesh: Any) -> tuple[set[str], Tensor]:
    """A rank's time is no reason: with parts of 4 and 3 blocks, its sizes are not the others'."""
    from torch_metalmm.models.fuse import times

    def timed(*args: Any) -> None:
        raise AssertionError("an MLP of a sharded model is timed")

    model = shard_(built("qwen3", "q8_0", **RAGGED["blocks"]), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(times, "_times", timed)
        fuse_(model)
    return {m.form for m in model.modules() if isinstance(m, SwiGLU)}, logits(model)


def test_the_form_of_an_mlp_is_not_timed() -> None:
    one, two = on_ranks(2, fused_untimed)
    assert one[0] == two[0] == {"swiglu"}
    assert torch.equal(one[1], two[1])


def misunderstood(mesh: Any) -> tuple[int, int]:
    """The fused layers, where one rank understands no first layer."""
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
    return len(calls), sum(map(_is_fused, model.model.layers))


def _is_fused(layer: Any) -> bool:
    return fused_layer(layer) is not None


def test_a_layer_that_one_rank_does_not_understand() -> None:
    """To confirm a layer runs its sums: the rank that knows would wait for the other."""
    assert on_ranks(2, misunderstood) == [(2, 1)] * 2


def resized(mesh: Any) -> list[str]:
    whole = quantize_(tiny_llama(), "q4_0", progress=False)
    count = whole.num_parameters()
    model = shard_(whole, mesh)
    assert model.num_parameters() == count
    assert fuse_(model).num_parameters() == count
    table = model.get_input_embeddings()
    assert model.resize_token_embeddings(VOCABULARY) is table
    with pytest.raises(ValueError) as caught:
        model.resize_token_embeddings(VOCABULARY // 2)  # the rows of a rank
    return [str(caught.value)]


def test_the_rows_of_a_table_are_those_of_all_ranks() -> None:
    for (said,) in on_ranks(2, resized):
        assert f"the RowsEmbedding has {VOCABULARY} rows packed in q4_0, which cannot be" in said

"""Which rows and columns ranks get, and the bytes of columns: without processes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from inputs import random_weight
from tiny_models import tiny_llama

from torch_metalmm import formats, quantize_
from torch_metalmm.models.shard.parts import Part
from torch_metalmm.models.shard.plan import plan_of
from torch_metalmm.models.shard.split import even, heads
from torch_metalmm.nn.collective import Ranks
from torch_metalmm.nn.sharded import Shard, columns

BLOCKS = 5


@pytest.mark.quick
@pytest.mark.parametrize("name", formats.names())
def test_columns_of_every_format(name: str) -> None:
    """The values of the columns, bit for bit, and the bytes of the whole again, in uneven parts."""
    spec = formats.get(name)
    k = BLOCKS * spec.block_values
    packed = random_weight(name, 3, k)
    w = spec.dequantize(packed, k)
    found = even(k, 3, spec.block_values)
    assert found is not None and [b - a for a, b in found] == [
        n * spec.block_values for n in (2, 2, 1)
    ]
    shards = [Shard(Ranks("", r, 3), False, found, 3, k, name) for r in range(3)]
    parts = [shard.take("weight", packed) for shard in shards]
    for part, (a, b) in zip(parts, found, strict=True):
        got = spec.dequantize(part, b - a)
        assert torch.equal(got.view(torch.int32), w[:, a:b].contiguous().view(torch.int32))
    assert torch.equal(shards[0].join(parts), packed)


@pytest.mark.quick
def test_columns_that_cut_a_block() -> None:
    packed = random_weight("q4_k", 2, 512)
    with pytest.raises(ValueError, match="K = 384 is not a multiple of the block of 256"):
        columns("q4_k", packed, 512, 128, 512)


@pytest.mark.quick
def test_even() -> None:
    for size, ranks, unit in product((1, 7, 32, 100, 1536), (1, 2, 3, 4), (1, 3, 32)):
        found = even(size, ranks, unit)
        units = -(-size // unit)
        assert (found is None) == (units < ranks)
        if found is None:
            continue
        assert found[0][0] == 0 and found[-1][1] == size
        assert all(a[1] == b[0] for a, b in zip(found, found[1:], strict=False))
        assert all(a % unit == 0 for a, _ in found)
        counts = [-(-(b - a) // unit) for a, b in found]
        assert max(counts) - min(counts) <= 1


@pytest.mark.quick
def test_heads() -> None:
    """Every head of queries once, beside the head of keys that it reads in the whole model."""
    divided = 0
    for keys, group, ranks, block in product((1, 2, 3, 8), (1, 2, 3, 7), (2, 3, 4), (32, 128, 256)):
        found = heads(keys * group, keys, ranks, 64, block)
        if found is None:
            continue
        divided += 1
        seen: list[int] = []
        for rank, ((a, b), (c, d)) in enumerate(zip(found.queries, found.keys, strict=True)):
            assert a < b and c < d
            assert a * 64 % block == 0
            local = found.groups(rank)
            assert local * (d - c) == b - a
            for i, query in enumerate(range(a, b)):
                assert query // group == c + i // local
            seen += range(a, b)
        assert seen == list(range(keys * group))
    assert divided > 40
    assert heads(8, 2, 4, 64, 32) is not None  # two ranks share a head of keys
    assert heads(8, 2, 4, 64, 256) is None  # and would share a block
    assert heads(3, 3, 4, 64, 32) is None


def parts(format: Any, ranks: int, plan: Any = None, **config: Any) -> Any:
    model = quantize_(tiny_llama(**config), format, progress=False)
    return plan_of(model, plan, ranks)


@pytest.mark.quick
def test_a_plan_says_what_is_replicated() -> None:
    found = parts("q4_k", 4, num_key_value_heads=4)
    ways = {name.rpartition(".")[2]: part.style for name, part in found.parts.items()}
    assert ways == {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    assert found.whole["model.layers.0.self_attn.k_proj"] == (
        "4 heads of queries and 4 of keys, of 64 values, where o_proj has blocks of 256"
    )
    assert found.whole["model.layers.1.mlp.up_proj"] == "down_proj has 512 inputs in blocks of 256"
    found = parts("q4_k", 2)
    assert found.parts["model.layers.0.mlp.gate_proj"] == Part("colwise", ((0, 256), (256, 512)))
    assert "model.layers.0.self_attn.q_proj" in found.whole


@pytest.mark.quick
def test_tied_layers_are_divided_alike() -> None:
    tied = {"tie_word_embeddings": True}
    found = parts("q4_0", 2, **tied)
    assert found.parts["lm_head"].ranges == found.parts["model.embed_tokens"].ranges
    found = parts("q4_0", 2, {"model.layers.*.mlp.down_proj": "rowwise_split_input"}, **tied)
    assert set(found.parts) == {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    with pytest.raises(ValueError, match="lm_head cannot be divided.*that of model.embed_tokens"):
        parts("q4_0", 2, {"lm_head": "colwise_gather_output"}, **tied)


@pytest.mark.quick
def test_a_tie_of_other_ranges_leaves_its_group_whole() -> None:
    """512 rows among 3: a gated MLP cuts between blocks of 32, a head anywhere."""
    model = tiny_llama(vocab_size=512)
    model.lm_head.weight = model.model.layers[0].mlp.gate_proj.weight
    found = plan_of(quantize_(model, "q4_0", progress=False), None, 3)
    mlp = "model.layers.0.mlp"
    whole = {f"{mlp}.{name}_proj" for name in ("gate", "up", "down")} | {"lm_head"}
    assert not whole & {*found.parts}
    assert found.whole["lm_head"] == f"its weight is that of {mlp}.gate_proj, too"
    assert found.whole[f"{mlp}.up_proj"] == "gate_proj: its weight is that of lm_head, too"
    assert "model.layers.1.mlp.up_proj" in found.parts


@pytest.mark.quick
def test_a_tie_of_rows_and_columns_leaves_both_whole() -> None:
    """Of a square matrix the ranges of both are equal."""
    model = tiny_llama(intermediate_size=256)
    mlp = model.model.layers[0].mlp
    mlp.down_proj.weight = mlp.gate_proj.weight
    found = plan_of(quantize_(model, "q4_0", progress=False), None, 2)
    parts = [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "down")]
    assert [name in found.parts for name in parts] == [False, False, True, True]


REFUSED: dict[str, tuple[Any, str]] = {
    "a layer that is none": ({"model.layers.*.mlp.gate": "colwise"}, "no layer 'model.layers"),
    "a style": ({"lm_head": "packed_colwise"}, "lm_head has the style 'packed_colwise'; allowed"),
    "experts": ({"model.layers.*.mlp.experts": "colwise"}, "experts are not sharded yet"),
    "a style of experts": ({"lm_head": "moe_tp_experts"}, "experts are not sharded yet"),
    "blocks": (
        {"model.layers.*.mlp.down_proj": "rowwise_split_input"},
        "down_proj cannot be divided among 4 ranks: it has 512 values in blocks of 256",
    ),
    "rows without columns": (
        {"model.layers.*.mlp.up_proj": "colwise"},
        "up_proj cannot be divided.*0 layers of the style rowwise; there must be one",
    ),
    "an embedding by columns": ({"model.embed_tokens": "colwise_gather_output"}, "not for a Quant"),
    "a norm": ({"model.norm": "colwise_gather_output"}, "it is a LlamaRMSNorm"),
}


@pytest.mark.quick
@pytest.mark.parametrize("what", REFUSED)
def test_plans_that_are_refused(what: str) -> None:
    plan, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        parts("q4_k", 4, plan)


@pytest.mark.quick
def test_a_model_without_a_plan() -> None:
    with pytest.raises(ValueError, match="Sequential has no tp_plan of its own: give plan="):
        plan_of(torch.nn.Sequential(torch.nn.Linear(32, 32)), None, 2)
    with pytest.raises(TypeError, match="plan must be {pattern: style}, got str"):
        plan_of(tiny_llama(), "auto", 2)  # type: ignore[arg-type]

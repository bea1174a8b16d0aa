"""What a plan makes of models that it fits in part: on the meta device, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import random_model
from torch import nn

from bench.models.families import sizes
from torch_metalmm.models.shard.parts import Plan
from torch_metalmm.models.shard.plan import plan_of

SIZES = sizes(256, 512, num_hidden_layers=4)
GEMMA4 = {
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 0,
}
ATTENTION, MLP = "model.layers.*.self_attn.", "model.layers.*.mlp."


def planned(kind: str, config: str, **options: Any) -> Plan:
    with torch.device("meta"):
        made = getattr(transformers, config)(**(SIZES | options))
        return plan_of(getattr(transformers, kind)(made), None, 2)


def gemma4(**options: Any) -> Plan:
    return planned("Gemma4ForCausalLM", "Gemma4TextConfig", **(GEMMA4 | options))


def divided(plan: Plan, part: str) -> set[str]:
    """The leaves of the layers that are divided, of those whose name has `part`."""
    return {name.rpartition(".")[2] for name in plan.parts if part in name}


def reasons(plan: Plan) -> set[str]:
    return set(plan.whole.values())


@pytest.mark.quick
def test_a_plan_of_a_class_names_experts_that_the_model_has_not() -> None:
    found = gemma4()
    assert found.whole == {}
    assert divided(found, "self_attn") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert divided(found, "mlp") == {"gate_proj", "up_proj", "down_proj"}
    sizes = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
    with pytest.raises(ValueError, match="experts are not sharded yet: model.layers.0.experts"):
        gemma4(enable_moe_block=True, **sizes)


@pytest.mark.quick
def test_keys_of_another_layer() -> None:
    """The last two layers read the cache of the first two: all heads of it, or as many as those."""
    found = gemma4(num_kv_shared_layers=2)
    assert divided(found, "self_attn") == set() and divided(found, "mlp") != set()
    assert reasons(found) == {
        "it reads the keys of another layer",
        "model.layers.2.self_attn may read its keys",
    }


@pytest.mark.quick
def test_norms_of_all_heads() -> None:
    config = {"pad_token_id": 0}
    found = planned("CohereForCausalLM", "CohereConfig", use_qk_norm=True, **config)
    assert divided(found, "self_attn") == set() and divided(found, "mlp") != set()
    assert reasons(found) == {"q_norm.weight is [4, 64], not a row of a head's 64 values"}
    assert planned("CohereForCausalLM", "CohereConfig", **config).whole == {}


@pytest.mark.quick
def test_a_style_of_the_model_that_is_none_of_ours() -> None:
    """Latent attention: what its layers give each other is not known, so none is divided."""
    found = planned("MiniCPM3ForCausalLM", "MiniCPM3Config", pad_token_id=0)
    assert divided(found, "self_attn") == set() and divided(found, "mlp") != set()
    assert reasons(found) == {
        "its style is 'mla_kv_a_proj'",
        "kv_a_proj_with_mqa has the style 'mla_kv_a_proj'",
    }
    assert "model.layers.0.self_attn.q_b_proj" in found.whole


class Normed(nn.Module):
    """An MLP with a norm of all its inner values, and one with a number for all of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm = nn.RMSNorm(size)


@pytest.mark.quick
def test_a_norm_between_the_layers_of_an_mlp() -> None:
    model = nn.Sequential(Normed(128), Normed(1))
    styles = {"up": "colwise", "down": "rowwise"}
    given = {f"0.{name}": style for name, style in styles.items()}
    with pytest.raises(ValueError, match=r"norm.weight, \[128\], is for all 128 inputs of down"):
        plan_of(model, given, 2)
    given = {f"1.{name}": style for name, style in styles.items()}
    assert divided(plan_of(model, given, 2), "1.") == {"up", "down"}


def styled(prefix: str, names: str, last: str) -> dict[str, str]:
    of = {prefix + name: "colwise" for name in names.split()}
    return of | {prefix + last: "rowwise"}


OF_LLAMA: dict[str, tuple[dict[str, str], str]] = {
    "no rows": (
        styled(MLP, "", "down_proj"),
        "no layer of model.layers.0.mlp has the style colwise and gives down_proj a part of its "
        "inputs; rowwise_split_input takes all of them",
    ),
    "one of two": (
        styled(MLP, "up_proj", "down_proj"),
        "gate_proj, of 512 outputs, too, is not of the style colwise",
    ),
    "no values": (
        styled(ATTENTION, "q_proj k_proj", "o_proj"),
        "v_proj, of the same heads, is not of the style colwise",
    ),
    "no keys": (
        styled(ATTENTION, "q_proj", "o_proj"),
        "k_proj, of the same heads, is not of the style colwise",
    ),
    "keys gathered": (
        styled(ATTENTION, "q_proj v_proj", "o_proj")
        | {f"{ATTENTION}k_proj": "colwise_gather_output"},
        "k_proj, of the same heads, is not of the style colwise",
    ),
}


BLOCK = "encoder.block.*.layer.*."
OF_T5: dict[str, tuple[dict[str, str], str]] = {
    "attention": (
        styled(f"{BLOCK}SelfAttention.", "q k v", "o"),
        "T5Attention has no head_dim or head_size, which says where heads end",
    ),
    "a weight that is read": (
        styled(f"{BLOCK}DenseReluDense.", "wi", "wo"),
        "wo: the model computes with its weight, or keeps it in float32",
    ),
    "such a weight alone": (
        {f"{BLOCK}DenseReluDense.wo": "rowwise_split_input"},
        "the model computes with its weight, or keeps it in float32",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "what"), [("llama", case) for case in OF_LLAMA] + [("t5", case) for case in OF_T5]
)
def test_layers_that_are_not_divided(kind: str, what: str) -> None:
    given, said = (OF_T5 if kind == "t5" else OF_LLAMA)[what]
    with pytest.raises(ValueError) as caught:
        plan_of(random_model(kind), given, 2)
    assert str(caught.value).endswith(f"cannot be divided among 2 ranks: {said}")


@pytest.mark.quick
def test_attention_that_counts_its_heads() -> None:
    """Its code makes num_heads of the outputs, whatever their number is."""

    class Counting(nn.Module):
        head_dim, num_heads = 32, 2

        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                self.add_module(name, nn.Linear(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x).view(len(x), self.num_heads, self.head_dim)

    given = styled("0.", "q_proj k_proj v_proj", "o_proj")
    with pytest.raises(ValueError, match="Counting computes with its num_heads, which is that of"):
        plan_of(nn.Sequential(Counting()), given, 2)

"""Checkpoints whose names are not the model's: a rank finds its parts under them, or says what is
missing, when from_pretrained packs or reads while it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import random_model
from ranks import on_each_rank
from test_shard_files import check_same
from test_shard_models import GPT2
from tiny_models import tiny_llama
from torch import nn

from torch_metalmm import MetalMMConfig, quantize_, save_packed, shard_

# Layers that stay dense are sharded all the same.
SPEC: dict[str, Any] = {"*layers.1.mlp.*": None, "*o_proj": "q8_0", "*": "q4_0"}


def llama(**options: Any) -> Any:
    return tiny_llama(seed=2, tie_word_embeddings=True, **options)


def gpt2_plan(prefix: str = "transformer.") -> dict[str, str]:
    return {prefix + n.removeprefix("transformer."): s for n, s in GPT2.items() if n != "lm_head"}


def loaded(kind: Any, folder: Path, plan: Any = "auto", spec: Any = SPEC) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    options: dict[str, Any] = {"tp_plan": plan}
    if plan != "auto":
        options = {"distributed_config": DistributedConfig(tp_size=2, tp_plan=plan)}
    if spec is not None:
        options["quantization_config"] = MetalMMConfig(modules=spec)
    return kind.from_pretrained(folder, **options)


def test_files_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """Files of the base model (`layers.0...`, `h.0...`) for the model with a head."""
    llama().model.save_pretrained(tmp_path / "llama")
    save_packed(quantize_(llama(), SPEC, progress=False).model, None, tmp_path / "packed")
    random_model("gpt2").transformer.save_pretrained(tmp_path / "gpt2")
    check_without_prefix(folder=tmp_path)


@on_each_rank(2)
def check_without_prefix(mesh: Any, folder: Path) -> None:
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    want = shard_(quantize_(llama(), SPEC, progress=False), mesh)
    check_same(loaded(LlamaForCausalLM, folder / "llama"), want)
    check_same(loaded(LlamaForCausalLM, folder / "packed", spec=None), want)
    plan = gpt2_plan() | {"lm_head": "colwise_gather_output"}
    want = shard_(quantize_(random_model("gpt2"), "q4_0", progress=False), mesh, plan)
    check_same(loaded(GPT2LMHeadModel, folder / "gpt2", plan, {"*": "q4_0"}), want)


def test_files_with_a_prefix_that_the_model_has_not(tmp_path: Path) -> None:
    """Files of the model with a head for the base model."""
    llama().save_pretrained(tmp_path)
    check_with_prefix(folder=tmp_path)


@on_each_rank(2)
def check_with_prefix(mesh: Any, folder: Path) -> None:
    from transformers import LlamaModel

    want = shard_(quantize_(llama(), SPEC, progress=False), mesh).model
    check_same(loaded(LlamaModel, folder), want)


def test_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    """No head, dense or packed, which one process draws; files whose names are not known first."""
    whole = tiny_llama()
    whole.model.save_pretrained(tmp_path / "base")
    whole.config.save_pretrained(tmp_path / "bin")
    torch.save(whole.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    check_lacks(folder=tmp_path)


@on_each_rank(2)
def check_lacks(mesh: Any, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    missing = "the checkpoint has no tensor for the sharded lm_head.weight"
    unread = "parts of a model are read from safetensors only, not from .*/bin/pytorch_model.bin"
    packed: dict[str, Any] = {"*": "q4_0"}
    for name, spec, said in (
        ("base", {"lm_head": None} | packed, missing),
        ("base", packed, missing),
        ("bin", packed, unread),
    ):
        with pytest.raises(ValueError, match=said):
            loaded(LlamaForCausalLM, folder / name, spec=spec)


@on_each_rank(2)
def test_a_whole_weight_is_not_set_in_a_part(mesh: Any) -> None:
    """Its rows have as many bytes: an embedding would look up others' rows in it."""
    model = shard_(quantize_(llama(), "q4_0", progress=False), mesh)
    layer: Any = model.model.layers[0].self_attn.q_proj
    whole = torch.zeros(layer.shard.n, layer.weight.shape[1], dtype=torch.uint8)
    said = rf"weight: rank {mesh.get_local_rank()} of 2 has 128 of 256 rows; got \[256, 144\]"
    with pytest.raises(ValueError, match=said):
        layer.weight = nn.Parameter(whole, requires_grad=False)
    layer.weight = nn.Parameter(whole[: layer.out_features], requires_grad=False)

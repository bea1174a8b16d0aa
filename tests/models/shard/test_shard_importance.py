"""Packing with an importance of columns while each of several ranks loads its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_each_rank
from test_shard_files import check_same
from tiny_models import tiny_llama

from torch_metalmm import MetalMMConfig, quantize_, read_importance, shard_
from torch_metalmm.files.imatrix import Entry, Imatrix, write_imatrix
from torch_metalmm.nn.sharded import ColumnsLinear

# Columns in formats whose weights depend on a block; rows in one where they depend on the row.
SPECS: dict[str, dict[str, str]] = {
    "ggml": {"*.down_proj": "q4_k", "*.o_proj": "iq4_nl", "*": "q4_0"},
    "affine": {"*.down_proj": "affine3_g64", "*.o_proj": "affine4_g32", "*": "q5_1"},
}


def dense_model() -> Any:
    return tiny_llama(seed=5, intermediate_size=1024)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dense model and an importance, of which the last rank's columns are next to nothing: a
    search never takes less than 2^-40 of the largest for a weight."""
    model = dense_model()
    model.save_pretrained(tmp_path)
    random, entries = np.random.default_rng(1), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            k = module.in_features
            sums = random.random((1, k), np.float32) * np.where(np.arange(k) < k // 2, 1, 1e-14)
            entries[name] = Entry(sums.astype(np.float32), np.array([1], np.float32))
    write_imatrix(tmp_path / "imatrix.gguf", Imatrix(entries))
    return tmp_path


def load(folder: Path, spec: dict[str, str]) -> Any:
    from transformers import LlamaForCausalLM

    config = MetalMMConfig(modules=spec, importance=folder / "imatrix.gguf")
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, tp_plan="auto")


@pytest.mark.parametrize("what", SPECS)
@on_each_rank(2)
def test_a_rank_packs_its_part_of_the_whole(mesh: Any, folder: Path, what: str) -> None:
    """As shard_ of the whole; columns are not as they are without an importance."""
    weighed = read_importance(folder / "imatrix.gguf", dense_model())
    packed = quantize_(dense_model(), SPECS[what], progress=False, importance=weighed)
    want = shard_(packed, mesh)
    plain = shard_(quantize_(dense_model(), SPECS[what], progress=False), mesh)
    check_same(load(folder, SPECS[what]), want)
    columns = {n: m for n, m in want.named_modules() if isinstance(m, ColumnsLinear)}
    assert len(columns) == 4
    for name, layer in columns.items():
        assert not torch.equal(layer.weight, plain.get_submodule(name).weight), name


@on_each_rank(2)
def test_columns_of_a_format_that_weighs_by_the_row(mesh: Any, folder: Path) -> None:
    said = r"importance: model.layers.0.mlp.down_proj is divided by columns, and q4_1 weighs"
    with pytest.raises(ValueError, match=said):
        load(folder, {"*.o_proj": "iq4_nl", "*": "q4_1"})

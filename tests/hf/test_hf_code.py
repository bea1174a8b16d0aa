"""Packed folders and adapters that want code to run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import spoiled_folders
import torch
import transformers
from safetensors.torch import load, save_file
from spoiled_folders import config

from torch_metalmm import load_packed

good, folder = spoiled_folders.good, spoiled_folders.folder  # fixtures
peft = pytest.importorskip("peft")


class _Runs:
    """Unpickling this creates the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Runs(folder / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors only, not from .*pytorch_model.bin"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load_packed(folder)
    assert not (folder / "ran").exists()


def test_code_beside_the_weights_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    load_packed(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}, "tokenizer_class": "T"})
    )
    config(folder, model_type="evil", architectures=["M"])
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_packed(folder)
    assert not (folder / "ran").exists()


def test_adapters_are_not_unpickled(folder: Path, tmp_path: Path) -> None:
    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)

    adapted = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["up_proj"], r=4))
    adapted.save_pretrained(tmp_path / "adapter")
    assert isinstance(peft.PeftModel.from_pretrained(model(), tmp_path / "adapter"), peft.PeftModel)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    with pytest.raises(Exception, match="(?i)header|metadata|incomplete|deserial"):
        peft.PeftModel.from_pretrained(model(), tmp_path / "adapter")
    tensors = {n: t[:-1].contiguous() for n, t in load(content).items()}
    save_file(tensors, weights)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(model(), tmp_path / "adapter")
    weights.unlink()
    torch.save({"x": _Runs(tmp_path / "ran")}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        peft.PeftModel.from_pretrained(model(), tmp_path / "adapter")
    assert not (tmp_path / "ran").exists()

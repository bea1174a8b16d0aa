"""Files that were copied with a packed model: they go with it, and with it alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import random_model as random_gguf
from hf_models import random_model
from safetensors.torch import save_file

from torch_metalmm import load_gguf, load_packed, quantize_, save_packed
from torch_metalmm.files.folder import recorded_beside
from torch_metalmm.hf.packed import save_beside

NAMES = {"modules.json", "1_Pooling/config.json", "mtp.safetensors"}


def packed() -> Any:
    return quantize_(random_model("llama"), "q8_0", progress=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed model with copied files, and a file of the user."""
    save_file({"of the first": torch.zeros(1)}, tmp_path / "a")
    save_beside(packed(), None, tmp_path / "b", dict.fromkeys(NAMES, tmp_path / "a"))
    (tmp_path / "b" / "README.md").touch()
    return tmp_path / "b"


def with_save_packed(model: Any, folder: Path) -> None:
    save_packed(model, None, folder)


def with_save_pretrained(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


@pytest.mark.parametrize("save", [with_save_packed, with_save_pretrained])
def test_another_model_takes_none(folder: Path, save: Any) -> None:
    assert recorded_beside(folder).keys() == NAMES
    for _ in range(2):  # what was loaded from the folder keeps them
        save(load_packed(folder)[0], folder)
        assert recorded_beside(folder).keys() == NAMES
    save(packed(), folder)
    assert not any((folder / name).exists() for name in (*NAMES, "1_Pooling"))
    assert (folder / "README.md").exists() and not recorded_beside(folder)
    (folder / "modules.json").touch()  # the user's
    save(packed(), folder)
    assert (folder / "modules.json").exists()


def test_a_record_names_nothing_else(folder: Path) -> None:
    (folder / ".git").mkdir()
    for name in (".git/config", "README.md"):
        shutil.copy(folder / "../a", folder / name)
    (folder / "1_Pooling" / "config.json").write_text("the user's")
    digest = recorded_beside(folder)["mtp.safetensors"]
    values = json.loads((folder / "config.json").read_text())
    given = [
        "../a",
        ".git/config",
        str(folder / "README.md"),
        "none",
        "1_Pooling",
        "mtp.safetensors",
    ]
    values["quantization_config"]["beside"] = dict.fromkeys(given, digest)
    (folder / "config.json").write_text(json.dumps(values))
    assert recorded_beside(folder).keys() == {"mtp.safetensors"}
    save_packed(packed(), None, folder)
    left = {"modules.json", "../a", ".git/config", "README.md", "1_Pooling/config.json"}
    assert all((folder / name).exists() for name in left)


def test_a_tokenizer_goes_with_its_model(tmp_path: Path) -> None:
    model, tokenizer = load_gguf(random_gguf(tmp_path / "m.gguf", "llama"))
    folder = tmp_path / "a"
    save_packed(model, tokenizer, folder)
    save_packed(load_packed(folder)[0], None, folder)
    assert load_packed(folder)[1] is not None
    save_packed(packed(), None, folder)
    assert load_packed(folder)[1] is None
    tokenizer.save_pretrained(folder)  # the user's
    save_packed(packed(), None, folder)
    assert load_packed(folder)[1] is not None

"""Model folders whose files are malformed or ask for too much: ValueErrors that name the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import random_model as random_gguf
from hf_models import random_model
from safetensors.torch import load_file, save_file
from spoiled_folders import Spoil, config

from torch_metalmm import (
    load_gguf,
    load_mlx,
    load_packed,
    quantize_,
    save_mlx,
    save_packed,
)
from torch_metalmm.files.limits import check_counts
from torch_metalmm.tools.cli import main

pytestmark = pytest.mark.usefixtures("quiet_transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """packed, mlx and dense: folders of one small model, with shards and a tokenizer."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = load_gguf(random_gguf(root / "m.gguf", "llama"))[1]
    model = random_model("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    model.save_pretrained(root / "dense", max_shard_size="100KB")
    tokenizer.save_pretrained(root / "dense")
    quantize_(model, "affine4_g32", progress=False)
    save_packed(model, tokenizer, root / "packed", max_shard_size="20KB")
    save_mlx(model, tokenizer, root / "mlx")
    return root


def load(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Load the folder; an error of the command line is a ValueError here."""
    if kind != "dense":
        {"packed": load_packed, "mlx": load_mlx}[kind](folder)
        return
    out = folder.with_name("out")
    if main(["quantize", str(folder), "--format", "q8_0", "--output", str(out)]) != 0:
        assert not out.exists()
        raise ValueError(capsys.readouterr().err.removeprefix("error: "))


def text(pattern: str, content: str) -> Spoil:
    def change(folder: Path) -> None:
        found = list(folder.glob(pattern))
        assert found
        for file in found:
            file.write_text(content)

    return change


def integers(folder: Path) -> None:
    for file in folder.glob("model*.safetensors"):
        tensors = load_file(file)
        tensors |= {n: t.to(torch.int32) for n, t in tensors.items() if "norm" in n}
        save_file(tensors, file, metadata={"format": "pt"})


DEEP = '{"a": ' + 100_000 * "[" + 100_000 * "]" + "}"
ALL = ("packed", "mlx", "dense")
INDEXED = ("packed", "dense")  # MLX's index is not read
NO_MODEL = "its files make no such model|no model fits its config"

CASES: dict[str, tuple[Spoil, str, tuple[str, ...]]] = {
    "deep config": (text("config.json", DEEP), "config.json is not JSON: maximum recursion", ALL),
    "deep index": (text("*.index.json", DEEP), "no weight_map of tensors", INDEXED),
    "deep tokenizer": (text("tokenizer.json", DEEP), "no tokenizer of its files", ALL),
    "index is a list": (text("*.index.json", "[]"), "no weight_map of tensors", INDEXED),
    "index without a map": (text("*.index.json", "{}"), "no weight_map of tensors", INDEXED),
    "index of text": (text("*.index.json", "{"), "no weight_map of tensors", INDEXED),
    "index of a number": (text("*.index.json", '{"weight_map": 5}'), "no weight_map", INDEXED),
    "index of no strings": (
        text("*.index.json", '{"weight_map": {"a": 1}}'),
        "names the weights 1, which is no file of the folder",
        INDEXED,
    ),
    "index without metadata": (
        text("*.index.json", '{"weight_map": {}}'),
        "make no such model: KeyError: 'metadata'",
        INDEXED,
    ),
    "index of a missing file": (
        text("*.index.json", '{"weight_map": {"a": "x.safetensors"}, "metadata": {}}'),
        "x.safetensors",
        INDEXED,
    ),
    "tokenizer is a list": (text("tokenizer_config.json", "[]"), "no tokenizer of its", ALL),
    "tokenizer of a number": (
        text("tokenizer_config.json", '{"tokenizer_class": 5}'),
        "makes no tokenizer of its files",
        ALL,
    ),
    "generation is a list": (
        text("generation_config.json", "[]"),
        "generation_config|no such",
        ALL,
    ),
    "norm of integers": (integers, r"norm.weight is (I32|torch.int32), not a float", ALL[:2]),
    "class is an object": (config(architectures={"a": 1}), "no class", ALL[:1]),
    "class is a number": (config(architectures=[5]), "no class", ALL[:1]),
    "type is a list": (config(model_type=["x"]), "no model_type|makes no config", ALL),
    "type is missing": (config(model_type=None), "no model_type|makes no config", ALL),
    "layers are text": (config(num_hidden_layers="x"), "makes no config .*num_hidden_layers", ALL),
    "heads are 0": (config(num_attention_heads=0), "makes no config", ALL),
    "width is 0": (config(hidden_size=0), "no such model|no rows of 0 inputs|must be U8", ALL),
    "width is huge": (config(hidden_size=2**40), "no such model|no model fits|U8", ALL),
    "width is beyond 64 bits": (config(hidden_size=10**30), NO_MODEL, ALL),
    "vocabulary is negative": (config(vocab_size=-5), NO_MODEL, ALL),
    "unknown activation": (config(hidden_act="zz"), "KeyError: 'zz'", ALL),
    "unknown rope": (config(rope_parameters={"rope_type": "zz"}), "KeyError: 'zz'", ALL),
    "padding beyond": (config(pad_token_id=2**40), "AssertionError: Padding_idx must be", ALL),
    "labels are text": (config(id2label={"x": 5}), "invalid literal|no config", INDEXED),
    "no dtype": (config(dtype="zz"), "has no attribute 'zz'", INDEXED),
    "layers of 1000": (  # other counts: below
        config(num_hidden_layers=1000),
        "config.json: num_hidden_layers = 1000, at most 128 are built for the tensors of",
        ALL,
    ),
    "layers beyond 64 bits": (
        config(num_hidden_layers=10**400),
        "num_hidden_layers = a number of 1329 bits, at most 128",
        ALL,
    ),
}


@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, (_, _, kinds) in CASES.items() for kind in kinds]
)
def test_odd_folders(
    tmp_path: Path, folders: Path, case: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message, _ = CASES[case]
    folder = tmp_path / "odd"
    shutil.copytree(folders / kind, folder)
    change(folder)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        load(kind, folder, capsys)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("kind", ALL)
def test_the_folders_load_as_they_are(
    tmp_path: Path, folders: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with counts that their classes state for other models."""
    shutil.copytree(folders / kind, tmp_path / "good")
    config(max_window_layers=28, vision_feature_layer=-2, num_experts_per_tok=2**31)(
        tmp_path / "good"
    )
    load(kind, tmp_path / "good", capsys)


# ---- counts


@pytest.mark.parametrize(
    ("tensors", "key", "most"),
    [
        (1, "num_hidden_layers", 128),  # a model of few tensors may state a default
        (200, "num_hidden_layers", 200),
        (200, "encoder_layers", 200),
        (0, "num_hidden_layers", 1024),  # weights of another kind are not counted
        (1, "num_local_experts", 1024),
        (1, "num_labels", 2**20),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_the_largest_counts_that_are_built(
    tensors: int, key: str, most: int, inside: bool, tmp_path: Path
) -> None:
    if tensors:
        save_file({str(i): torch.zeros(1) for i in range(tensors)}, tmp_path / "model.safetensors")

    def counts(count: int) -> dict[str, object]:
        return {"parts": [{"text_config": {key: count}}]} if inside else {key: count}

    check_counts(tmp_path, counts(most))
    with pytest.raises(ValueError, match=f"config.json: {key} = {most + 1}, at most {most} are"):
        check_counts(tmp_path, counts(most + 1))
    with pytest.raises(ValueError, match=f"{key} = a number of 70 bits, at most {most} are"):
        check_counts(tmp_path, counts(2**69))

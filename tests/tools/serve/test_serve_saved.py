"""`metalmm serve --prompts FILE`: what was read outlives the process, and nothing else does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from answered import Asked, answered, endless, pool
from gguf_files import random_model
from layer_models import SHARED, small
from safetensors import safe_open
from safetensors.torch import save_file
from serving import KEY, OTHER_KEY, serving

from torch_metalmm import fuse_, load_gguf
from torch_metalmm.hf.caches.pages import SLOTS
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.saved import SavedPrompts

NEW = 5


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return endless("qwen35 fused", tmp_path_factory.mktemp("r"))


@pytest.fixture(params=["loaded", "recurrent"])
def either(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def prompt(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=count)


def ask(batch: Batch, ids: list[int], owner: bytes = b"") -> tuple[int, list[torch.Tensor]]:
    job = Asked(ids, NEW, owner=owner)
    answered(batch, job)
    return job.finish.kept_tokens, job.logits


def test_a_next_process_begins_where_prompts_did(either: Any, tmp_path: Path) -> None:
    """For their owners alone, with the same bits; what has no room is what was used first."""
    file = tmp_path / "prompts"
    head = prompt(1, 2 * SLOTS)
    texts = [(prompt(2, 200), b""), (head + prompt(3, 150), b"a"), (head + prompt(4, 150), b"a")]
    first = pool(either, 1, 32)
    logits = [ask(first, ids, owner)[1] for ids, owner in texts]
    SavedPrompts(file, first).write()
    assert file.stat().st_mode & 0o777 == 0o600
    for (ids, owner), wanted, kept in zip(texts, logits, (128, 192, 192), strict=True):
        batch = pool(either, 1, 32)
        SavedPrompts(file, batch).read()
        assert ask(batch, ids, b"b")[0] == 0
        count, found = ask(batch, ids, owner)
        assert count == kept
        assert len(found) == NEW and all(map(torch.equal, found, wanted))
    for room, held in ((6, (0, 4, 4)), (5, (0, 3, 4)), (1, (0, 1, 1))):
        batch = pool(either, 1, room)
        SavedPrompts(file, batch).read()
        pages = batch.cache.pages
        assert pages.available == room
        assert tuple(len(pages.find(ids, len(ids), owner)) for ids, owner in texts) == held


def test_what_is_restored_is_saved_again(either: Any, tmp_path: Path) -> None:
    """In the same order, and an empty cache as one."""
    files = [tmp_path / name for name in ("a", "b", "empty")]
    batch, again = pool(either, 1, 16), pool(either, 1, 16)
    SavedPrompts(files[2], batch).write()
    SavedPrompts(files[2], batch).read()
    for seed in (5, 6):
        ask(batch, prompt(seed, 200), b"owner")
    SavedPrompts(files[0], batch).write()
    SavedPrompts(files[0], again).read()
    SavedPrompts(files[1], again).write()
    assert files[0].read_bytes() == files[1].read_bytes()


def test_another_model_is_refused(loaded: Any, tmp_path: Path) -> None:
    """Of other weights, with another cache, or computed in other ops."""
    file = tmp_path / "prompts"
    batch = pool(loaded, 1, 8)
    SavedPrompts(file, batch).write()
    SavedPrompts(file, pool(loaded, 1, 8)).read()
    other = load_gguf(random_model(tmp_path / "o.gguf", "llama", seed=1))
    fused = load_gguf(random_model(tmp_path / "f.gguf", "llama"))
    SavedPrompts(file, pool(fused, 1, 8)).read()
    fuse_(fused[0])
    for one in (pool(other, 1, 8), pool(loaded, 1, 8, format="f16"), pool(fused, 1, 8)):
        with pytest.raises(ValueError, match=r"--prompts .*prompts: of another model"):
            SavedPrompts(file, one).read()


def contents(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file of prompts, and its metadata."""
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in tuple(opened.keys())}
        return tensors, opened.metadata()


def test_a_damaged_file_is_refused(loaded: Any, tmp_path: Path) -> None:
    file, batch = tmp_path / "prompts", pool(loaded, 1, 8)
    ask(batch, prompt(7, 300))
    SavedPrompts(file, batch).write()
    tensors, metadata = contents(file)
    said = json.loads(metadata["metalmm_prompts"])
    before, tokens = tensors["before"], tensors["tokens"]
    assert len(before) == 4
    for changed, meta, told in (
        ({}, {"version": 2}, "no prompts of version 1"),
        ({}, {"owners": ["x"]}, "hex"),
        ({}, {"owners": []}, "range"),
        ({"before": before + 3}, {}, "before: 2 of page 0; must be"),
        ({"before": before * 0 - 1, "tokens": tokens * 0}, {}, "page 1 is there twice"),
        ({"tokens": tokens[:, :5].clone()}, {}, r"tokens: torch.int64 \[4, 5\]; must be"),
        ({"layers.0.keys": tensors["layers.0.keys"][:, :3].clone()}, {}, "layers.0.keys: .*must"),
    ):
        metadata = {"metalmm_prompts": json.dumps(said | meta)}
        save_file(tensors | changed, file, metadata=metadata)
        with pytest.raises(ValueError, match=f"--prompts {file}: .*{told}"):
            SavedPrompts(file, pool(loaded, 1, 8)).read()
    file.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=f"--prompts {file}: "):
        SavedPrompts(file, batch).read()


def test_damaged_states_are_refused(recurrent: Any, tmp_path: Path) -> None:
    file, batch = tmp_path / "prompts", pool(recurrent, 1, 8)
    ask(batch, prompt(7, 300))
    SavedPrompts(file, batch).write()
    tensors, metadata = contents(file)
    for changed, told in (
        ({"behind": tensors["behind"] - 9}, "behind: .*-7.*; must be different ones of 4 pages"),
        ({"behind": tensors["behind"] + 9}, "behind: .*11.*; must be different ones of 4 pages"),
        ({"behind": tensors["behind"].int()}, "behind: torch.int32"),
        ({"states.1": tensors["states.1"][:, :1].clone()}, "states.1: .*must be"),
    ):
        save_file(tensors | changed, file, metadata=metadata)
        with pytest.raises(ValueError, match=f"--prompts {file}: .*{told}"):
            SavedPrompts(file, pool(recurrent, 1, 8)).read()


def test_layers_that_read_rows_of_others(loaded: Any, tmp_path: Path) -> None:
    """They have none to be saved."""
    model = small("gemma4_text", **SHARED, max_position_embeddings=512)
    ids, file = [3 + i % 90 for i in range(200)], tmp_path / "prompts"
    first, again = (pool((model, loaded[1]), 1, 8) for _ in range(2))
    wanted = ask(first, ids)[1]
    SavedPrompts(file, first).write()
    SavedPrompts(file, again).read()
    kept, found = ask(again, ids)
    assert kept == 128 and all(map(torch.equal, found, wanted))


def test_two_servers(tmp_path: Path) -> None:
    """One after the other; the first is ended by a signal."""
    model, file = random_model(tmp_path / "m.gguf", "llama", context=512), tmp_path / "prompts"
    body = {"prompt": prompt(9, 200), "max_tokens": 4, "temperature": 0}
    found = list[Any]()
    for keys in ((KEY,), (OTHER_KEY, KEY)):
        with serving(str(model), "--prompts", str(file)) as served:
            for key in keys:
                status, _, told = served.ask("/v1/completions", body, key)
                assert status == 200
                kept = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                found.append((kept, told["choices"]))
    assert [kept for kept, _ in found] == [0, 0, 128]
    assert found[0][1] == found[1][1] == found[2][1]

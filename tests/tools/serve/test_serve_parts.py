"""Embeddings of `metalmm serve` in parts, and what is left off where the client is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import random_model

from torch_metalmm import fuse_, load_gguf
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.tools.chat.session import Options, Session
from torch_metalmm.tools.serve.embedding import Embedder
from torch_metalmm.tools.serve.engine import Job, stoppable
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.single import Single

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
    model, told, entered = loaded[0], list[Any](), list[Any]()
    runner, layers = Single(Session(*loaded, Options())), model.base_model.layers
    gone = Job("", LONG[:100], Options(max_new_tokens=4), 1, told.append)

    def leave(layer: Any, _: Any) -> None:
        entered.append(layer)
        gone.is_cancelled = True

    hooks = [layer.register_forward_pre_hook(leave) for layer in layers]
    runner.take(gone)
    runner.step()
    for hook in hooks:
        hook.remove()
    assert entered == [layers[0]] and not told and runner.room() == 1
    answers = []
    for one in (runner, Single(Session(*loaded, Options()))):
        said = list[Any]()
        one.take(Job("", LONG[:100], Options(max_new_tokens=4), 1, said.append))
        one.step()
        answers.append(said)
    assert answers[0] == answers[1]


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

"""Steps of `metalmm serve` in which one answer fails, or its client is gone: the others go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answered import Asked, run

from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.embedding import Embedder
from torch_metalmm.tools.serve.engine import Runner
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.single import Single
from torch_metalmm.tools.writing import Finish

NEW = 12
IDS = [3, 4, 5]


@pytest.mark.parametrize("first", (True, False), ids=("first", "last"))
def test_an_answer_whose_token_cannot_be_chosen(loaded: tuple[Any, Any], first: bool) -> None:
    """Its logits are infinite: it alone is told."""
    bad, good = Asked(IDS, NEW, temperature=1.0, repeat_penalty=1e-40), Asked(IDS, NEW)
    run(Batch(*loaded, 2), *((bad, good) if first else (good, bad)))
    assert isinstance(bad.told[-1], RuntimeError) and len(bad.told) == 1
    assert good.finish == Finish("length", len(IDS), 0, NEW)


def test_an_answer_that_fails_later(loaded: tuple[Any, Any]) -> None:
    """Telling it a piece may fail, too; the other's tokens are those it has alone."""
    bad, good, alone = Asked([5, 6, 7, 8], NEW), Asked(IDS, NEW), Asked(IDS, NEW)

    def tell(what: Any) -> None:
        bad.told.append(what)
        if len(bad.told) == 1:
            raise RuntimeError("no more")

    bad.tell = tell
    batch = Batch(*loaded, 2)
    run(batch, bad, good)
    run(Batch(*loaded, 1), alone)
    assert isinstance(bad.told[1], RuntimeError) and len(bad.told) == 2
    assert good.told == alone.told and not batch.is_busy()


def test_a_prompt_that_cannot_be_read(loaded: tuple[Any, Any]) -> None:
    bad, good = Asked([1 << 30], NEW), Asked(IDS, NEW)
    run(Batch(*loaded, 2), good, bad)
    assert isinstance(bad.told[0], Exception) and len(bad.told) == 1
    assert good.finish == Finish("length", len(IDS), 0, NEW)


def test_a_step_that_fails_is_told(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, to the answers and to the prompts that wait."""

    def fail(*_: Any) -> Any:
        raise MemoryError

    batch, jobs = Batch(*loaded, 2), (Asked(IDS, NEW), Asked(IDS, NEW))
    for job in jobs:
        batch.take(job)
    with torch.inference_mode():
        batch.step()
        monkeypatch.setattr(batch, "_forward", fail)
        with pytest.raises(MemoryError) as error:
            batch.step()
    batch.fail(error.value)
    for job in jobs:
        assert [what for what in job.told if not isinstance(what, str)] == [error.value]
    assert batch.room() == 2


def test_clients_that_left_behind_a_long_prompt(loaded: tuple[Any, Any]) -> None:
    batch, gone = Batch(*loaded, 3), [Asked(IDS, NEW), Asked(IDS, NEW)]
    for given in (Asked(IDS * 400, NEW), *gone):
        batch.take(given)
    for given in gone:
        given.is_cancelled = True
    with torch.inference_mode():
        batch.step()
    assert batch.room() == 2


def test_an_answer_has_its_place_when_its_first_token_is_told(loaded: tuple[Any, Any]) -> None:
    """Another thread may look at that moment."""
    batch, seen, job = Batch(*loaded, 2), list[tuple[bool, int]](), Asked(IDS, NEW)
    job.tell = lambda _: seen.append((batch.is_busy(), batch.room()))
    run(batch, job)
    assert len(seen) > 2 and set(seen) == {(True, 1)}
    assert batch.room() == 2


@pytest.mark.parametrize(("kind", "most"), (("batch", 128), ("single", 199)))
def test_owners(
    loaded: tuple[Any, Any], kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runner keeps an owner's prompts for it alone."""
    monkeypatch.setattr(loaded[0].config, "max_position_embeddings", 256)
    runner: Any = Batch(*loaded, 1)
    if kind == "single":
        runner = Single(Session(*loaded))
    ids, kept = [3 + i % 60 for i in range(200)], list[int]()
    for owner in (b"a", b"a", b"ab", b"", b""):
        job = Asked(ids, 2, owner=owner)
        run(runner, job)
        kept.append(job.finish.kept_tokens)
    assert kept == [0, most, 0, 0, most]


@pytest.mark.parametrize("asked", (None, 1.0), ids=("the model's", "the request's"))
def test_the_repetition_penalty(
    loaded: tuple[Any, Any], asked: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's, else the model's, whichever runner there is."""
    model, tokenizer = loaded
    plain = Asked(IDS, NEW)
    run(Batch(model, tokenizer, 1), plain)
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.7)
    texts = []
    for runner in (Batch(*loaded, 1), Single(Session(*loaded))):
        job = Asked(IDS, NEW, repeat_penalty=asked)
        run(runner, job)
        texts.append("".join(job.texts))
    assert texts[0] == texts[1]
    assert (texts[0] == "".join(plain.texts)) == (asked is not None)


def test_the_string_that_ends_an_answer_is_named(runner: Runner) -> None:
    whole = Asked(IDS, NEW)
    run(runner, whole)
    stop = "".join(whole.texts)[2:4]
    job = Asked(IDS, NEW, stops=[stop])
    run(runner, job)
    assert len(stop) == 2 and (job.finish.reason, job.finish.stop) == ("stop", stop)


def test_embeddings_of_too_many_tokens(loaded: tuple[Any, Any]) -> None:
    embedder = Embedder(*loaded, "last", None)
    for texts, told in (([[3] * 8193], "8193 tokens"), ([[3] * 8000] * 38, "more than 300000")):
        with pytest.raises(ApiError, match=told) as error:
            embedder.tokens_of(texts)
        assert error.value.code == "context_length_exceeded"

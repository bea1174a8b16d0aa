"""Steps of `metalmm serve` in which one answer fails, or its client is gone: the others go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answered import run

from torch_metalmm.tools.chat.session import Options, Session
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.embedding import Embedder
from torch_metalmm.tools.serve.engine import Finish, Job
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.single import Single

NEW = 12
IDS = [3, 4, 5]


def job(told: list[Any], ids: list[int] = IDS, **options: Any) -> Job:
    return Job("", ids, Options(**{"max_new_tokens": NEW} | options), 1, told.append)


@pytest.mark.parametrize("first", (True, False), ids=("first", "last"))
def test_an_answer_whose_token_cannot_be_chosen(loaded: tuple[Any, Any], first: bool) -> None:
    """Its logits are infinite: it alone is told."""
    bad, good = list[Any](), list[Any]()
    jobs = [job(bad, temperature=1.0, repeat_penalty=1e-40), job(good)]
    run(Batch(*loaded, 2), *(jobs if first else reversed(jobs)))
    assert isinstance(bad[-1], RuntimeError) and len(bad) == 1
    assert good[-1] == Finish("length", len(IDS), 0, NEW)


def test_an_answer_that_fails_later(loaded: tuple[Any, Any]) -> None:
    """Telling it a piece may fail, too; the other's tokens are those it has alone."""
    bad, good, alone = list[Any](), list[Any](), list[Any]()

    def tell(what: Any) -> None:
        bad.append(what)
        if len(bad) == 1:
            raise RuntimeError("no more")

    batch = Batch(*loaded, 2)
    run(batch, Job("", [5, 6, 7, 8], Options(max_new_tokens=NEW), 1, tell), job(good))
    run(Batch(*loaded, 1), job(alone))
    assert isinstance(bad[1], RuntimeError) and len(bad) == 2
    assert good == alone and not batch.is_busy()


def test_a_prompt_that_cannot_be_read(loaded: tuple[Any, Any]) -> None:
    bad, good = list[Any](), list[Any]()
    run(Batch(*loaded, 2), job(good), job(bad, [1 << 30]))
    assert isinstance(bad[0], Exception) and len(bad) == 1
    assert good[-1] == Finish("length", len(IDS), 0, NEW)


def test_a_step_that_fails_is_told(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, to the answers and to the prompts that wait."""

    def fail(*_: Any) -> Any:
        raise MemoryError

    batch, told = Batch(*loaded, 2), (list[Any](), list[Any]())
    batch.take(job(told[0]))
    batch.take(job(told[1]))
    with torch.inference_mode():
        batch.step()
        monkeypatch.setattr(batch, "_forward", fail)
        with pytest.raises(MemoryError) as error:
            batch.step()
    batch.fail(error.value)
    for found in told:
        assert [what for what in found if not isinstance(what, str)] == [error.value]
    assert batch.room() == 2


def test_clients_that_left_behind_a_long_prompt(loaded: tuple[Any, Any]) -> None:
    batch, told = Batch(*loaded, 3), list[Any]()
    gone = [job(told), job(told)]
    for given in (job(told, IDS * 400), *gone):
        batch.take(given)
    for given in gone:
        given.is_cancelled = True
    with torch.inference_mode():
        batch.step()
    assert batch.room() == 2


def test_an_answer_has_its_place_when_its_first_token_is_told(loaded: tuple[Any, Any]) -> None:
    """Another thread may look at that moment."""
    batch, seen = Batch(*loaded, 2), list[tuple[bool, int]]()

    def tell(_: Any) -> None:
        seen.append((batch.is_busy(), batch.room()))

    run(batch, Job("", IDS, Options(max_new_tokens=NEW), 1, tell))
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
        runner = Single(Session(*loaded, Options()))
    ids, kept = [3 + i % 60 for i in range(200)], list[int]()
    for owner in (b"a", b"a", b"ab", b"", b""):
        told = list[Any]()
        run(runner, Job("", ids, Options(max_new_tokens=2), None, told.append, owner))
        assert isinstance(told[-1], Finish)
        kept.append(told[-1].kept_tokens)
    assert kept == [0, most, 0, 0, most]


@pytest.mark.parametrize("asked", (None, 1.0), ids=("the model's", "the request's"))
def test_the_repetition_penalty(
    loaded: tuple[Any, Any], asked: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's, else the model's, whichever runner there is."""
    model, tokenizer = loaded
    plain = list[Any]()
    run(Batch(model, tokenizer, 1), job(plain))
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.7)
    texts = []
    for runner in (Batch(*loaded, 1), Single(Session(*loaded, Options()))):
        told = list[Any]()
        run(runner, job(told, repeat_penalty=asked))
        texts.append("".join(what for what in told if isinstance(what, str)))
    assert texts[0] == texts[1]
    assert (texts[0] == "".join(map(str, plain[:-1]))) == (asked is not None)


def test_embeddings_of_too_many_tokens(loaded: tuple[Any, Any]) -> None:
    embedder = Embedder(*loaded, "last", None)
    for texts, told in (([[3] * 8193], "8193 tokens"), ([[3] * 8000] * 38, "more than 300000")):
        with pytest.raises(ApiError, match=told) as error:
            embedder.tokens_of(texts)
        assert error.value.code == "context_length_exceeded"

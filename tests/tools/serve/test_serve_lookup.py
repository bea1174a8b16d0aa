"""Guesses of `metalmm serve --lookup`: answers are those without, to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from answered import answered, endless, pool
from serving import Served

from torch_metalmm import formats
from torch_metalmm.hf.drafts import Lookup
from torch_metalmm.tools.chat.session import Options
from torch_metalmm.tools.serve.batch import ROWS, RUN, _Answer
from torch_metalmm.tools.serve.engine import Finish, Job

NEW = 40


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3 fused"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return endless(request.param, tmp_path_factory.mktemp("m"))


def jobs(told: list[list[Any]]) -> list[Job]:
    """Prompts that repeat themselves, some of them greedy, with ends at several lengths."""
    draw, found = random.Random(5), []
    for i, own in enumerate(told):
        ids = draw.choices(range(3, 300), k=9) * 8
        options = Options(temperature=0.01 * (i % 3), max_new_tokens=NEW - 7 * i)
        found.append(Job("", ids, options, i, own.append))
    return found


@pytest.fixture(scope="module")
def plain(loaded: Any) -> tuple[list[list[Any]], list[list[torch.Tensor]]]:
    """What the jobs are told without guesses, and the logits of their tokens."""
    told = [list[Any]() for _ in range(5)]
    made = jobs(told)
    found = answered(pool(loaded, 1, 32, 0), made)
    return told, [found[id(job)] for job in made]


@pytest.mark.parametrize("name", [n for n in formats.names() if formats.get(n).packs])
def test_rows_of_a_step(name: str) -> None:
    """Up to ROWS have the bits that each has alone."""
    kind = formats.get(name)
    w, x = kind.quantize(torch.randn(48, 512)), torch.randn(ROWS, 512)
    rows = [torch.ops.metalmm.linear(x[:n], w, None, name) for n in range(1, ROWS + 1)]
    alone = torch.cat([torch.ops.metalmm.linear(row[None], w, None, name) for row in x])
    assert all(torch.equal(y, alone[: len(y)]) for y in rows)


@pytest.mark.covering
@pytest.mark.parametrize(("most", "pages"), [(1, 32), (2, 32), (4, 32), (4, 5)])
@pytest.mark.parametrize("are_wrong", (False, True), ids=("found", "wrong"))
def test_answers_are_those_without_guesses(
    loaded: Any,
    plain: Any,
    most: int,
    pages: int,
    are_wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One, two or four in a step, and where the pages run out."""
    told = [list[Any]() for _ in range(5)]
    with_guesses = jobs(told)
    if are_wrong:
        monkeypatch.setattr(_Answer, "_guess", lambda _, most: [317, 318, 319][: max(0, most)])
    logits = answered(pool(loaded, most, pages, 3), with_guesses)
    for job, own, alone, wanted in zip(with_guesses, told, *plain, strict=True):
        assert len(logits[id(job)]) == len(wanted)
        assert all(map(torch.equal, logits[id(job)], wanted))
        assert own[:-1] == alone[:-1] and own[-1][:4] == alone[-1][:4]
        assert alone[-1][4:6] == (0, 0)
    right, wrong = (sum(own[-1][i] for own in told) for i in (4, 5))
    assert (wrong > right) if are_wrong else (right > 0)


def test_steps_that_are_saved(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each right guess is a step less."""
    batch, told, steps = pool(loaded, 1, 32, 3), [list[Any]()], list[int]()
    forward = batch._forward

    def seen(ids: list[list[int]], *given: Any) -> Any:
        steps.append(len(ids[0]))
        return forward(ids, *given)

    monkeypatch.setattr(batch, "_forward", seen)
    answered(batch, jobs(told))
    finish = told[0][-1]
    assert len(steps) == NEW - finish.right_guesses and max(steps[1:]) == 4
    assert finish.right_guesses + finish.wrong_guesses == sum(steps[1:]) - len(steps[1:])


@pytest.mark.parametrize("what", ("cancelled", "fails", "one fails"))
def test_a_step_of_guesses_that_does_not_end(loaded: Any, plain: Any, what: str) -> None:
    """No page is lost, and the next answer is right."""
    batch, told = pool(loaded, 2, 32, 3), [list[Any](), list[Any]()]
    first, second = jobs(told)
    batch.take(first)
    batch.take(second)
    forward, choose = batch._forward, batch._goes_on

    def broken(ids: list[list[int]], *given: Any) -> Any:
        logits = forward(ids, *given)
        if len(ids) == 2 and len(ids[0]) > 1:
            batch._forward = forward  # type: ignore[method-assign]
            if what == "fails":
                raise MemoryError
            if what == "cancelled":
                first.is_cancelled = True
            else:
                logits[0, 1] = torch.nan
                first.options.form = None
                batch._answers[0].chooser.choose = refuses  # type: ignore[method-assign]
        return logits

    def refuses(*_: Any) -> int:
        raise RuntimeError("no token")

    batch._forward = broken  # type: ignore[method-assign]
    with torch.inference_mode():
        while batch.is_busy():
            try:
                batch.step()
            except MemoryError as error:
                batch.fail(error)
    assert batch._forward == forward and batch._goes_on == choose
    assert batch.cache.pages.available == 32
    alone = plain[0][:2]
    if what == "fails":
        assert all(isinstance(own[-1], MemoryError) for own in told)
    else:
        assert told[1][:-1] == alone[1][:-1]
        assert not any(isinstance(one, Finish) for one in told[0])
    again = [list[Any](), list[Any]()]
    answered(batch, jobs(again))
    assert [own[:-1] for own in again] == [own[:-1] for own in alone]


def test_usage(tiny: Served) -> None:
    body = {"prompt": [3, 4, 5] * 30, "temperature": 0, "max_tokens": 40}
    usage = tiny.ask("/v1/completions", body | {"logit_bias": {"9": 100}})[2]["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 20
    assert usage["completion_tokens"] == 40


def test_guesses_become_fewer_where_they_were_wrong() -> None:
    """As many as were right, at least one; twice as many where all were."""
    answer, seen = _Answer.__new__(_Answer), []
    answer.tokens, answer.lookup = [1, 2, 3, 4, 1, 2, 3], Lookup(RUN)
    answer._most = answer._width = 3
    for right in (0, 1, 2, 2, 2):
        seen.append(answer._guess(min(3, answer._width)))
        answer.learn(len(seen[-1]), right)
    assert seen == [[4, 1, 2], [4], [4, 1], [4, 1, 2], [4, 1]]

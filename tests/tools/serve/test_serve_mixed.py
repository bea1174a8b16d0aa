"""Requests of all kinds, of which the cache holds a tenth: answers and memory stay what they are.

METALMM_TEST_CASES=all makes 2,000 of them.
"""

from __future__ import annotations

import random
from typing import Any

import psutil
import pytest
from answered import pool, run
from backends import CASES

from torch_metalmm.hf.caches.pages import SLOTS
from torch_metalmm.tools.chat.session import Options
from torch_metalmm.tools.serve.batch import guessing_of
from torch_metalmm.tools.serve.engine import Finish, Job

COUNT = 2000 if CASES == "all" else 40
WARM = COUNT // 4  # requests after which every page was used; memory is compared from here on


def request(draw: random.Random, heads: list[list[int]], told: list[Any]) -> Job:
    """With a beginning of others or none, short or long, greedy or drawn, perhaps given up."""
    ids = [*draw.choice([[], *heads]), *draw.choices(range(3, 300), k=draw.choice((5, 90, 250)))]
    options = Options(
        temperature=draw.choice((0.0, 0.7, 1.3)),
        top_p=draw.choice((None, 0.9)),
        max_new_tokens=draw.choice((1, 9, 40)),
    )
    leaves = draw.randrange(6) if draw.random() < 0.3 else None

    def tell(what: Any) -> None:
        told.append(what)
        job.is_cancelled = job.is_cancelled or len(told) == leaves

    owner = draw.choice((b"one", b"another"))
    job = Job("", ids, options, draw.randrange(1000), tell, owner, is_cancelled=leaves == 0)
    return job


def requests(told: list[list[Any]]) -> list[Job]:
    draw = random.Random(8)
    heads = [draw.choices(range(3, 300), k=n) for n in (64, 130, 200, 300)]
    return [request(draw, heads, own) for own in told]


@pytest.fixture(scope="module")
def alone(loaded: tuple[Any, Any]) -> list[list[Any]]:
    """What each is told that has an empty cache for itself, and does not leave."""
    told = [list[Any]() for _ in range(COUNT)]
    for job, own in zip(requests([[] for _ in told]), told, strict=True):
        run(pool(loaded, 1, 16), Job("", job.ids, job.options, job.seed, own.append))
    return told


@pytest.mark.parametrize("draft", (None, "lookup"))
def test_mixed_requests(loaded: tuple[Any, Any], alone: list[list[Any]], draft: str | None) -> None:
    told = [list[Any]() for _ in range(COUNT)]
    jobs = requests(told)
    slots = sum(len(job.ids) + int(job.options.max_new_tokens or 0) for job in jobs)
    count = slots // SLOTS // 10
    guessing = draft and guessing_of(draft, *loaded)
    batch, resident = pool(loaded, 4, count, guessing or None), list[int]()
    for some in (jobs[:WARM], jobs[WARM:]):
        run(batch, *some)
        resident.append(psutil.Process().memory_info().rss)
    pages = batch.cache.pages
    assert pages.available == pages.count == count and len(pages._known) <= count
    assert resident[1] <= 1.05 * resident[0]
    kept = cancelled = 0
    for job, own, wanted in zip(jobs, told, alone, strict=True):
        texts = [what for what in own if not isinstance(what, Finish)]
        cancelled += job.is_cancelled
        if len(texts) == len(own) and job.is_cancelled:
            assert texts == wanted[: len(texts)]
            continue
        assert texts == wanted[:-1]
        assert own[-1].reason == wanted[-1].reason and own[-1].new_tokens == wanted[-1].new_tokens
        kept += own[-1].kept_tokens > 0
    assert kept > COUNT // 10 and cancelled > COUNT // 10

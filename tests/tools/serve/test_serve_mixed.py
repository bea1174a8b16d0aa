"""Requests of all kinds, of which the cache holds a tenth: answers and memory stay what they are.

METALMM_TEST_CASES=all makes 2,000 of them.
"""

from __future__ import annotations

import random
from typing import Any

import psutil
import pytest
from answered import Asked, pool, run
from backends import CASES

from torch_metalmm.hf.caches.pages import SLOTS
from torch_metalmm.tools.serve.batch import guessing_of

COUNT = 2000 if CASES == "all" else 40
WARM = COUNT // 4  # requests after which every page was used; memory is compared from here on


def request(draw: random.Random, heads: list[list[int]]) -> Asked:
    """With a beginning of others or none, short or long, greedy or drawn, perhaps given up."""
    ids = [*draw.choice([[], *heads]), *draw.choices(range(3, 300), k=draw.choice((5, 90, 250)))]
    options = {"temperature": draw.choice((0.0, 0.7, 1.3)), "top_p": draw.choice((None, 0.9))}
    new = draw.choice((1, 9, 40))
    leaves = draw.randrange(6) if draw.random() < 0.3 else None

    def tell(what: Any) -> None:
        job.told.append(what)
        job.is_cancelled = job.is_cancelled or len(job.told) == leaves

    owner = draw.choice((b"one", b"another"))
    job = Asked(ids, new, draw.randrange(1000), owner, **options)
    job.tell, job.is_cancelled = tell, leaves == 0
    return job


def requests() -> list[Asked]:
    draw = random.Random(8)
    heads = [draw.choices(range(3, 300), k=n) for n in (64, 130, 200, 300)]
    return [request(draw, heads) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def alone(loaded: tuple[Any, Any]) -> list[Asked]:
    """Each has an empty cache for itself, and does not leave."""
    jobs = requests()
    for job in jobs:
        job.tell, job.is_cancelled = job.hear, False
        run(pool(loaded, 1, 16), job)
    return jobs


@pytest.mark.parametrize("draft", (None, "lookup"))
def test_mixed_requests(loaded: tuple[Any, Any], alone: list[Asked], draft: str | None) -> None:
    jobs = requests()
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
    for job, wanted in zip(jobs, alone, strict=True):
        cancelled += job.is_cancelled
        if job.is_cancelled and job.told == job.texts:
            assert job.texts == wanted.texts[: len(job.texts)]
            continue
        assert job.told[:-1] == wanted.told[:-1]
        assert job.finish.reason == wanted.finish.reason
        assert job.finish.new_tokens == wanted.finish.new_tokens
        kept += job.finish.kept_tokens > 0
    assert kept > COUNT // 10 and cancelled > COUNT // 10

"""Answers of `metalmm serve` out of one cache: prompts that begin alike, and a small cache."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from answered import Asked, answered, endless, pool

from torch_metalmm.hf.caches import paged
from torch_metalmm.hf.caches.paged import Text
from torch_metalmm.hf.caches.pages import SLOTS, PoolFull
from torch_metalmm.tools.serve.batch import LEAST, Batch
from torch_metalmm.tools.writing import Finish

NEW = 9


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3 fused", "qwen35 fused"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return endless(request.param, tmp_path_factory.mktemp("m"))


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=count)


def asked(batch: Batch, *prompts: list[int]) -> list[Asked]:
    jobs = [Asked(ids, NEW) for ids in prompts]
    answered(batch, *jobs)
    return jobs


def same(a: Asked, b: Asked) -> bool:
    return len(a.logits) == len(b.logits) == NEW and all(map(torch.equal, a.logits, b.logits))


def test_a_prompt_begins_where_an_earlier_one_did(loaded: Any) -> None:
    """In whole pages, and with LEAST tokens to read; the bits are those of an empty cache."""
    first, batch = tokens(1, 300), pool(loaded, 2, 32)
    assert asked(batch, first)[0].finish.kept_tokens == 0
    for shared, kept in ((300, 192), (255, 192), (63, 0), (64, 64)):
        ids = first[:shared] + tokens(2, 30 + LEAST - 30 * (shared == 64))
        if shared == 300:
            ids = first
        (job,) = asked(batch, ids)
        if batch.cache.states and shared == 64:  # states are kept at each 512 and near the end
            kept = 0
        assert job.finish.kept_tokens == kept, shared
        assert same(job, *asked(pool(loaded, 1, 32), ids))
    assert batch.cache.pages.available == 32


def test_states_are_kept_behind_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recurrent layers, where a part of 512 tokens ends; the last used ones stay."""
    loaded = endless("qwen35 fused", tmp_path)
    batch, head = pool(loaded, 2, 64), tokens(5, 600)
    with pytest.raises(ValueError, match=r"memory: 9999 bytes; 64 .* states of 2 texts take \d+$"):
        Batch(*loaded, 2, "q8_0", 9999)
    of_text = sum(math.prod(shape) * d.itemsize for d, shape in batch.cache.states.shapes())
    page = batch.cache.page_bytes
    for free, most in ((4 * of_text + page, 2), (4 * of_text - 1, 1), (of_text + page, 1)):
        monkeypatch.setattr(paged, "default_memory", lambda _, free=free: free)
        few = Batch(*loaded, 2, "q8_0")
        assert few.room() == few.cache.states.count == most, free
    asked(batch, head + tokens(6, 200))
    second = head + tokens(7, 90)
    (wanted,) = asked(pool(loaded, 1, 64), second)
    (job,) = asked(batch, second)
    assert job.finish.kept_tokens == 512 and same(job, wanted)
    batch = pool(loaded, 2, 64)
    batch.cache.states.most_kept = 1
    for ids, kept in ((second, 0), (second, 576), (tokens(8, 200), 0), (second, 0)):
        (job,) = asked(batch, ids)
        assert job.finish.kept_tokens == kept
        assert ids is not second or same(job, wanted)
    batch.cache.states.most_kept = 2
    a, b, c = (tokens(seed, 200) for seed in (50, 51, 52))
    found = [asked(batch, ids)[0].finish.kept_tokens for ids in (a, b, a, c, a, b)]
    assert found == [0, 0, 128, 0, 128, 0]
    batch.cache.states.most_kept = 0
    assert [asked(batch, ids)[0].finish.kept_tokens for ids in (c, c)] == [0, 0]
    texts = [Text(batch.cache) for _ in range(3)]
    for text in texts[:2]:
        text.begin([], 0)
    with pytest.raises(PoolFull, match="states of all 2 texts"):
        texts[2].begin([], 0)


def test_texts_under_way_keep_states_once(tmp_path: Path) -> None:
    """Two that read the same at a time take the place of one, and no other goes."""
    batch = pool(endless("qwen35 fused", tmp_path), 2, 64)
    batch.cache.states.most_kept = 2
    a, b = tokens(60, 200), tokens(61, 200)
    for prompts in ([a], [b, b]):
        asked(batch, *prompts)
    assert asked(batch, a)[0].finish.kept_tokens == 128


def test_prompts_under_way_share(loaded: Any) -> None:
    head = tokens(3, 3 * SLOTS)
    prompts = [head + tokens(10 + i, 70 + i) for i in range(3)]
    for job in asked(pool(loaded, 3, 32), *prompts):
        assert same(job, *asked(pool(loaded, 1, 32), job.ids))


def test_a_cache_of_which_the_texts_need_more(loaded: Any) -> None:
    """The youngest gives its pages back, and is read anew; nobody notices but by the time."""
    prompts = [tokens(20 + i, 120 + i) for i in range(6)]  # 3 pages each, with the answer
    batch = pool(loaded, 4, 5)
    for job in asked(batch, *prompts):
        assert job.finish == Finish("length", len(job.ids), 0, NEW)
        (alone,) = asked(pool(loaded, 1, 32), job.ids)
        # A token that was read again has its logits twice.
        assert all(any(torch.equal(a, b) for b in job.logits) for a in alone.logits)
    assert batch.cache.pages.available == 5


def test_a_text_that_is_longer_than_the_cache(loaded: Any) -> None:
    """It alone is told, and the next is answered."""
    batch, job = pool(loaded, 2, 2), Asked(tokens(30, 2 * SLOTS - 3), NEW)
    batch.take(job)
    with torch.inference_mode(), pytest.raises(PoolFull, match="one text alone") as error:
        while True:
            batch.step()
    batch.fail(error.value)
    assert job.told[-1] is error.value
    assert asked(batch, tokens(31, 20))[0].finish.new_tokens == NEW


def test_the_only_answer_gives_its_pages_to_a_prompt(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the younger one, and nothing is left to step."""
    batch = pool(loaded, 2, 6)
    monkeypatch.setattr(batch, "_part_size", lambda: SLOTS)
    jobs = Asked(tokens(40, 6 * SLOTS), 1), Asked(tokens(41, SLOTS - 4), NEW)
    lost, give = list[int](), batch._give_back

    def noted() -> None:
        give()
        lost.append(len(batch._answers))

    monkeypatch.setattr(batch, "_give_back", noted)
    answered(batch, *jobs)
    assert lost == [0]
    for job, new in zip(jobs, (1, NEW), strict=True):
        assert job.finish == Finish("length", len(job.ids), 0, new)

"""Answers of `metalmm serve` out of one cache: prompts that begin alike, and a small cache."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from answered import answered, endless, pool

from torch_metalmm.hf.caches import paged
from torch_metalmm.hf.caches.paged import Text
from torch_metalmm.hf.caches.pages import SLOTS, PoolFull
from torch_metalmm.tools.chat.session import Options
from torch_metalmm.tools.serve.batch import LEAST, Batch
from torch_metalmm.tools.serve.engine import Finish, Job

NEW = 9


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3 fused", "qwen35 fused"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return endless(request.param, tmp_path_factory.mktemp("m"))


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=count)


def logits_of(batch: Batch, prompts: list[list[int]]) -> list[tuple[Finish, list[torch.Tensor]]]:
    """What each answer ends with, and the logits that its tokens were chosen by."""
    told = [list[Any]() for _ in prompts]
    jobs = [
        Job("", ids, Options(max_new_tokens=NEW), None, own.append)
        for ids, own in zip(prompts, told, strict=True)
    ]
    found = answered(batch, jobs)
    for own in told:
        assert isinstance(own[-1], Finish), own[-1]
    return [(own[-1], found[id(job)]) for own, job in zip(told, jobs, strict=True)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) == NEW and all(map(torch.equal, a, b))


def test_a_prompt_begins_where_an_earlier_one_did(loaded: Any) -> None:
    """In whole pages, and with LEAST tokens to read; the bits are those of an empty cache."""
    first, batch = tokens(1, 300), pool(loaded, 2, 32)
    assert logits_of(batch, [first])[0][0].kept_tokens == 0
    for shared, kept in ((300, 192), (255, 192), (63, 0), (64, 64)):
        ids = first[:shared] + tokens(2, 30 + LEAST - 30 * (shared == 64))
        if shared == 300:
            ids = first
        (finish, logits), *_ = logits_of(batch, [ids])
        if batch.cache.states and shared == 64:  # states are kept at each 512 and near the end
            kept = 0
        assert finish.kept_tokens == kept, shared
        assert same(logits, logits_of(pool(loaded, 1, 32), [ids])[0][1])
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
    logits_of(batch, [head + tokens(6, 200)])
    second = head + tokens(7, 90)
    wanted = logits_of(pool(loaded, 1, 64), [second])[0][1]
    (finish, logits), *_ = logits_of(batch, [second])
    assert finish.kept_tokens == 512 and same(logits, wanted)
    batch = pool(loaded, 2, 64)
    batch.cache.states.most_kept = 1
    for ids, kept in ((second, 0), (second, 576), (tokens(8, 200), 0), (second, 0)):
        (finish, logits), *_ = logits_of(batch, [ids])
        assert finish.kept_tokens == kept
        assert ids is not second or same(logits, wanted)
    batch.cache.states.most_kept = 2
    a, b, c = (tokens(seed, 200) for seed in (50, 51, 52))
    found = [logits_of(batch, [ids])[0][0].kept_tokens for ids in (a, b, a, c, a, b)]
    assert found == [0, 0, 128, 0, 128, 0]
    batch.cache.states.most_kept = 0
    assert [logits_of(batch, [ids])[0][0].kept_tokens for ids in (c, c)] == [0, 0]
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
        logits_of(batch, prompts)
    assert logits_of(batch, [a])[0][0].kept_tokens == 128


def test_prompts_under_way_share(loaded: Any) -> None:
    head = tokens(3, 3 * SLOTS)
    prompts = [head + tokens(10 + i, 70 + i) for i in range(3)]
    found = logits_of(pool(loaded, 3, 32), prompts)
    for ids, (_, logits) in zip(prompts, found, strict=True):
        assert same(logits, logits_of(pool(loaded, 1, 32), [ids])[0][1])


def test_a_cache_of_which_the_texts_need_more(loaded: Any) -> None:
    """The youngest gives its pages back, and is read anew; nobody notices but by the time."""
    prompts = [tokens(20 + i, 120 + i) for i in range(6)]  # 3 pages each, with the answer
    batch = pool(loaded, 4, 5)
    found = logits_of(batch, prompts)
    for ids, (finish, logits) in zip(prompts, found, strict=True):
        assert finish == Finish("length", len(ids), 0, NEW)
        alone = logits_of(pool(loaded, 1, 32), [ids])[0][1]
        # A token that was read again has its logits twice.
        assert all(any(torch.equal(a, b) for b in logits) for a in alone)
    assert batch.cache.pages.available == 5


def test_a_text_that_is_longer_than_the_cache(loaded: Any) -> None:
    """It alone is told, and the next is answered."""
    batch, told = pool(loaded, 2, 2), list[Any]()
    batch.take(Job("", tokens(30, 2 * SLOTS - 3), Options(max_new_tokens=NEW), None, told.append))
    with torch.inference_mode(), pytest.raises(PoolFull, match="one text alone") as error:
        while True:
            batch.step()
    batch.fail(error.value)
    assert told[-1] is error.value
    assert logits_of(batch, [tokens(31, 20)])[0][0].new_tokens == NEW


def test_the_only_answer_gives_its_pages_to_a_prompt(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the younger one, and nothing is left to step."""
    batch, told = pool(loaded, 2, 6), [list[Any](), list[Any]()]
    monkeypatch.setattr(batch, "_part_size", lambda: SLOTS)
    prompts, most = (tokens(40, 6 * SLOTS), tokens(41, SLOTS - 4)), (1, NEW)
    jobs = [
        Job("", ids, Options(max_new_tokens=new), None, own.append)
        for ids, new, own in zip(prompts, most, told, strict=True)
    ]
    lost, give = list[int](), batch._give_back

    def noted() -> None:
        give()
        lost.append(len(batch._answers))

    monkeypatch.setattr(batch, "_give_back", noted)
    answered(batch, jobs)
    assert lost == [0]
    for ids, new, own in zip(prompts, most, told, strict=True):
        assert own[-1] == Finish("length", len(ids), 0, new)

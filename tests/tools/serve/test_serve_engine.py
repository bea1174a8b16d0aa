"""The engine of `metalmm serve`: answers that share steps, and places that are freed."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from answered import Asked, answered
from gguf_files import random_model
from greedy import greedy
from layer_models import SHARED, VOCABULARY, small

from bench.models.families import family
from torch_metalmm import activations_, fuse_, load_gguf
from torch_metalmm.formats.activations import TOP_CODES
from torch_metalmm.hf.replay import replayed
from torch_metalmm.tools.chat import loading
from torch_metalmm.tools.chat.session import Session
from torch_metalmm.tools.chat.template import Template
from torch_metalmm.tools.serve import command
from torch_metalmm.tools.serve.batch import Batch, can_share
from torch_metalmm.tools.serve.engine import Engine, Job, Task
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.feed import Feed
from torch_metalmm.tools.serve.single import Single
from torch_metalmm.tools.writing import Finish

pytest.importorskip("anyio")

LENGTHS = (5, 50, 17, 90, 3)
NEW = 12
MEMORY = 1 << 25  # bytes; a quarter of a machine is millions of states of small models


MAKERS: dict[str, Callable[[str, Path], Any]] = {
    "gguf": lambda kind, folder: load_gguf(random_model(folder / "m.gguf", kind))[0],
    "rounded": lambda kind, folder: activations_(MAKERS["gguf"]("qwen3", folder), kind),
    "shared rows": lambda kind, _: small(kind, **SHARED, max_position_embeddings=256),
    "family": lambda kind, _: family(kind),
}
# (who makes the model, its kind, whether it is fused, the format of its cache)
ANSWERING = [
    *(("gguf", "llama", False, None), ("gguf", "gemma3", False, "q8_0")),
    *(("gguf", "gemma3", True, None), ("gguf", "qwen3", True, "q8_0")),
    *(("gguf", "phi3", True, None), ("gguf", "qwen35", True, None)),
    *(("gguf", kind, True, "q8_0") for kind in ("gemma4", "qwen35moe", "lfm2")),
    *(("rounded", kind, True, "q8_0") for kind in TOP_CODES),
    *(("shared rows", "gemma4_text", True, None), ("shared rows", "gemma4_text", False, "q8_0")),
    ("shared rows", "gemma3n_text", True, "q8_0"),
    *(("family", kind, True, "q8_0") for kind in ("qwen3_next", "falcon_h1", "bamba")),
    *(("family", kind, True, "q8_0") for kind in ("granitemoehybrid", "nemotron_h")),
]


@pytest.mark.parametrize(("maker", "kind", "fused", "cache"), ANSWERING)
def test_answers_that_join_and_leave(
    loaded: Any, maker: str, kind: str, fused: bool, cache: str | None, tmp_path: Path
) -> None:
    """Each is to the bit what it is alone; gemma3's windows are shorter than two of the prompts."""
    model, tokenizer = MAKERS[maker](kind, tmp_path), loaded[1]
    model.generation_config.eos_token_id = None
    if fused:
        fuse_(model)
    assert can_share(model)
    prompts = [torch.randint(3, VOCABULARY, (length,)).tolist() for length in LENGTHS]
    jobs = [Asked(ids, NEW + 3 * i) for i, ids in enumerate(prompts)]
    answered(Batch(model, tokenizer, 4, cache, MEMORY), *jobs)
    if fused:  # the steps are few kinds, on memory that stays
        assert replayed(model).replays > NEW  # type: ignore[union-attr]
    for i, job in enumerate(jobs):
        assert job.finish == Finish("length", len(job.ids), 0, NEW + 3 * i)
        alone = Asked(job.ids, NEW + 3 * i)
        answered(Batch(model, tokenizer, 1, cache, MEMORY), alone)
        assert all(map(torch.equal, job.logits, alone.logits))
        if cache is None:
            likeliest = [int(logits.argmax()) for logits in alone.logits]
            assert likeliest == greedy(model, job.ids, NEW + 3 * i, eos_token_id=None)


def test_a_prompt_of_one_token_is_no_step(loaded: Any) -> None:
    """Nemotron-H limits dt otherwise in a prompt than in a step, of which a recording is known."""
    model, tokenizer = fuse_(family("nemotron_h")), loaded[1]
    model.generation_config.eos_token_id = None
    first, again = Asked([5], 6), Asked([5], 6)
    answered(Batch(model, tokenizer, 1, "q8_0", MEMORY), first)
    warm = Batch(model, tokenizer, 1, "q8_0", MEMORY)
    for _ in range(4):
        answered(warm, Asked([7, 9, 11], NEW))
    assert replayed(model).replays > NEW  # type: ignore[union-attr]
    answered(warm, again)
    assert len(again.logits) == 6 and all(map(torch.equal, again.logits, first.logits))


def test_what_cannot_share_steps(tmp_path: Path) -> None:
    """States that are no rows of tokens."""
    model, _ = load_gguf(random_model(tmp_path / "m.gguf", "qwen35"))
    assert not can_share(model)


def submit(engine: Engine, request: Job | Task) -> None:
    engine.reserve()
    engine.submit(request)


@pytest.mark.parametrize("kind", ("batch", "single"))
def test_a_cancelled_answer_frees_its_place(loaded: Any, kind: str) -> None:
    """At its next token; the one that waits is answered, and errors reach who asked."""
    runner: Any = Batch(*loaded, 1) if kind == "batch" else Single(Session(*loaded))
    engine = Engine(runner, queue=1)
    long, short, wrong = Asked([3, 4, 5], 1 << 20), Asked([3, 4, 5], 4), Asked([1 << 30], 4)

    def leave(what: Any) -> None:
        long.told.append(what)
        if len(long.told) == 3:
            engine.cancel(long)

    long.tell = leave
    engine.start()
    for job in (long, short):
        submit(engine, job)
    assert short.ended.wait(60) and short.finish and len(long.texts) <= 4
    submit(engine, wrong)
    assert wrong.ended.wait(60) and isinstance(wrong.told[0], Exception)
    engine.close()
    with pytest.raises(ApiError) as closed:
        engine.reserve()
    assert closed.value.status == 503


def test_a_task_has_parts(loaded: Any) -> None:
    """Answers go on between them; it ends where it is cancelled, and with the engine."""
    engine = Engine(Batch(*loaded, 1), queue=2)
    ended, told = [threading.Event() for _ in range(2)], list[Any]()

    def endless(i: int) -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            ended[i].set()

    given, job = threading.Event(), Asked([3, 4, 5], 4)

    def work() -> Generator[None, None, int]:
        yield
        return 7

    def gives(what: Any) -> None:
        told.append(what)
        given.set()

    first = Task(endless(0), told.append)
    engine.start()
    submit(engine, first)
    submit(engine, Task(work(), gives))  # in vain until the first one is cancelled
    submit(engine, job)
    assert job.ended.wait(60) and not ended[0].is_set()
    engine.cancel(first)
    assert ended[0].wait(60) and given.wait(60) and told == [7]
    submit(engine, Task(endless(1), told.append))
    while engine.load()[0]:
        pass
    engine.close()
    assert isinstance(told[1], ApiError) and told[1].status == 503


def test_a_place_is_kept_for_what_is_prepared(loaded: Any) -> None:
    """And the time that this takes is of the request."""
    engine = Engine(Batch(*loaded, 1), queue=1)

    async def ask() -> None:
        feeds = [Feed(engine, 0.1) for _ in range(2)]
        with pytest.raises(ApiError) as full:
            Feed(engine, 60)
        assert full.value.status == 429
        with pytest.raises(ApiError) as late:
            await feeds[0].within(asyncio.sleep(60))
        assert late.value.status == 504
        with pytest.raises(ApiError, match="the answer took more than 0.1 s"):
            await feeds[1].result()
        feeds[0].close()
        feeds[0].close()
        with pytest.raises(ApiError):  # both or none
            Feed(engine, 60, 2)
        again = Feed(engine, 60)
        with pytest.raises(ApiError):
            Feed(engine, 60)
        again.submit([Asked([3], 2)])
        with pytest.raises(ApiError):
            Feed(engine, 60)
        assert engine.load()[0] == 1
        again.close()
        assert engine.load()[0] == 0
        Feed(engine, 60)

    asyncio.run(ask())


def test_one_thread_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the model, too: a second thread with OpenMP's threads would let both wait."""
    file = random_model(tmp_path / "m.gguf", "llama")
    parser, threads, load = argparse.ArgumentParser(), list[threading.Thread](), loading.load
    command.add_serve(parser)

    def seen(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return load(*given, **named)

    monkeypatch.setattr(loading, "load", seen)
    args = parser.parse_args(["-m", str(file)])
    with closing(Template()) as template:
        engine = command._server(args, template, {}).engine
    threads.append(engine.worker.call(threading.current_thread).result())
    assert threads[0] is threads[1] is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        engine.worker.call(lambda: 1 // 0).result()
    assert engine.worker.call(torch.get_num_threads).result() == torch.get_num_threads()

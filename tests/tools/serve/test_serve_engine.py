"""The engine of `metalmm serve`: answers that share steps, and places that are freed."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from answered import answered
from gguf_files import random_model
from greedy import greedy
from layer_models import SHARED, VOCABULARY, small

from bench.models.families import family
from torch_metalmm import activations_, fuse_, load_gguf
from torch_metalmm.formats.activations import TOP_CODES
from torch_metalmm.hf.replay import replayed
from torch_metalmm.tools.chat import loading
from torch_metalmm.tools.chat.session import Options, Session
from torch_metalmm.tools.chat.template import Template
from torch_metalmm.tools.serve import command
from torch_metalmm.tools.serve.batch import Batch, can_share
from torch_metalmm.tools.serve.engine import Engine, Finish, Job, Task
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.single import Single

pytest.importorskip("anyio")

LENGTHS = (5, 50, 17, 90, 3)
NEW = 12
MEMORY = 1 << 25  # bytes; a quarter of a machine is millions of states of small models


@pytest.mark.parametrize(
    ("architecture", "fused", "cache"),
    [
        *(("llama", False, None), ("gemma3", False, "q8_0"), ("gemma3", True, None)),
        *(("qwen3", True, "q8_0"), ("phi3", True, None), ("gemma4", True, "q8_0")),
        *(("qwen35", True, None), ("qwen35moe", True, "q8_0"), ("lfm2", True, "q8_0")),
    ],
)
def test_answers_that_join_and_leave(
    tmp_path: Path, architecture: str, fused: bool, cache: str | None
) -> None:
    """Each is to the bit what it is alone; gemma3's windows are shorter than two of the prompts."""
    model, tokenizer = load_gguf(random_model(tmp_path / "m.gguf", architecture))
    check_answers(model, tokenizer, fused, cache)


@pytest.mark.parametrize(
    ("kind", "fused", "cache"),
    [("gemma4_text", True, None), ("gemma4_text", False, "q8_0"), ("gemma3n_text", True, "q8_0")],
)
def test_layers_that_read_rows_of_others(
    loaded: Any, kind: str, fused: bool, cache: str | None
) -> None:
    check_answers(small(kind, **SHARED, max_position_embeddings=256), loaded[1], fused, cache)


@pytest.mark.parametrize(
    "kind", ["qwen3_next", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h"]
)
def test_families_with_states(loaded: Any, kind: str) -> None:
    check_answers(family(kind), loaded[1], True, "q8_0")


@pytest.mark.parametrize("kind", TOP_CODES)
def test_rounded_activations(tmp_path: Path, kind: str) -> None:
    model, tokenizer = load_gguf(random_model(tmp_path / "m.gguf", "qwen3"))
    check_answers(activations_(model, kind), tokenizer, True, "q8_0")


def test_a_prompt_of_one_token_is_no_step(loaded: Any) -> None:
    """Nemotron-H limits dt otherwise in a prompt than in a step, of which a recording is known."""
    model, tokenizer = fuse_(family("nemotron_h")), loaded[1]
    model.generation_config.eos_token_id = None
    job = Job("", [5], Options(max_new_tokens=6), None, lambda _: None)
    wanted = answered(Batch(model, tokenizer, 1, "q8_0", MEMORY), [job])[id(job)]
    warm = Batch(model, tokenizer, 1, "q8_0", MEMORY)
    for _ in range(4):
        answered(warm, [Job("", [7, 9, 11], Options(max_new_tokens=NEW), None, lambda _: None)])
    assert replayed(model).replays > NEW  # type: ignore[union-attr]
    assert all(map(torch.equal, answered(warm, [job])[id(job)], wanted))


def check_answers(model: Any, tokenizer: Any, fused: bool, cache: str | None) -> None:
    model.generation_config.eos_token_id = None
    if fused:
        fuse_(model)
    assert can_share(model)
    told: list[list[Any]] = [[] for _ in LENGTHS]
    jobs = []
    for i, length in enumerate(LENGTHS):
        ids = [int(token) for token in torch.randint(3, VOCABULARY, (length,))]
        jobs.append(Job("", ids, Options(max_new_tokens=NEW + 3 * i), None, told[i].append))
    together = answered(Batch(model, tokenizer, 4, cache, MEMORY), jobs)
    if fused:  # the steps are few kinds, on memory that stays
        assert replayed(model).replays > NEW  # type: ignore[union-attr]
    for i, job in enumerate(jobs):
        assert told[i][-1] == Finish("length", len(job.ids), 0, NEW + 3 * i)
        by_itself = answered(Batch(model, tokenizer, 1, cache, MEMORY), [job])[id(job)]
        assert all(map(torch.equal, together[id(job)], by_itself))
        if cache is None:
            likeliest = [int(logits.argmax()) for logits in by_itself]
            assert likeliest == greedy(model, job.ids, NEW + 3 * i, eos_token_id=None)


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
    runner: Any = Batch(*loaded, 1) if kind == "batch" else Single(Session(*loaded, Options()))
    engine = Engine(runner, queue=1)
    first, second = threading.Event(), threading.Event()
    count: list[Any] = []

    def cancel(what: Any) -> None:
        count.append(what)
        if len(count) == 3:
            engine.cancel(long)
            first.set()

    def end(what: Any) -> None:
        if isinstance(what, Finish):
            second.set()

    long = Job("", [3, 4, 5], Options(max_new_tokens=1 << 20), None, cancel)
    engine.start()
    submit(engine, long)
    submit(engine, Job("", [3, 4, 5], Options(max_new_tokens=4), None, end))
    assert first.wait(60) and second.wait(60)
    assert sum(isinstance(what, str) for what in count) <= 4
    failed: list[Any] = []
    done = threading.Event()

    def told(what: Any) -> None:
        failed.append(what)
        done.set()

    submit(engine, Job("", [1 << 30], Options(max_new_tokens=4), None, told))
    assert done.wait(60) and isinstance(failed[0], Exception)
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

    def end(what: Any) -> None:
        if isinstance(what, Finish):
            answered.set()

    answered, given = threading.Event(), threading.Event()

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
    submit(engine, Job("", [3, 4, 5], Options(max_new_tokens=4), None, end))
    assert answered.wait(60) and not ended[0].is_set()
    engine.cancel(first)
    assert ended[0].wait(60) and given.wait(60) and told == [7]
    submit(engine, Task(endless(1), told.append))
    while engine.load()[0]:
        pass
    engine.close()
    assert isinstance(told[1], ApiError) and told[1].status == 503


def test_a_place_is_kept_for_what_is_prepared(loaded: Any) -> None:
    """And the time that this takes is of the request."""
    from torch_metalmm.tools.serve.feed import Feed

    engine = Engine(Batch(*loaded, 1), queue=1)

    async def ask() -> None:
        feeds = [Feed(engine, 0.1) for _ in range(2)]
        with pytest.raises(ApiError) as full:
            Feed(engine, 60)
        assert full.value.status == 429
        with pytest.raises(ApiError) as late:
            await feeds[0].within(asyncio.sleep(60))
        assert late.value.status == 504
        feeds[0].close()
        feeds[0].close()
        with pytest.raises(ApiError):  # both or none
            Feed(engine, 60, 2)
        again = Feed(engine, 60)
        with pytest.raises(ApiError):
            Feed(engine, 60)
        again.submit([Job("", [3], Options(max_new_tokens=2), None, again.tell)])
        with pytest.raises(ApiError):
            Feed(engine, 60)
        again.close()
        Feed(engine, 60)

    asyncio.run(ask())


def test_a_deadline(loaded: Any) -> None:
    """What still waits when its time is over is told so, and waits no more."""
    from torch_metalmm.tools.serve.feed import Feed

    engine = Engine(Batch(*loaded, 1), queue=1)
    engine.start()
    begun, go = threading.Event(), threading.Event()

    def wait() -> Generator[None, None, None]:
        begun.set()
        go.wait(60)
        yield

    submit(engine, Task(wait(), lambda _: None))
    assert begun.wait(60)

    async def ask() -> ApiError:
        feed = Feed(engine, 0.2)
        feed.submit([Job("", [3], Options(max_new_tokens=2), None, feed.tell)])
        with pytest.raises(ApiError) as late:
            await feed.result()
        assert engine.load()[0] == 1
        feed.close()
        return late.value

    error = asyncio.run(ask())
    assert error.status == 504 and engine.load()[0] == 0
    go.set()
    engine.close()


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

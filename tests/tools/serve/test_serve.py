"""`metalmm serve` with the real SmolLM2 and a client that exists: the package openai."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from greedy import greedy_chat
from serving import Served

openai = pytest.importorskip("openai")

# Greedy, the model repeats this for ever.
ENDLESS = {
    "prompt": "One, two, three, one, two, three, one, two, three,",
    "temperature": 0,
    "max_tokens": 8000,
}
QUESTIONS = (
    "What is the capital of France?",
    "Name three rivers of Europe, please.",
    "Hi",
    "Count from one to ten in words, and then back again to one.",
)


@pytest.fixture(scope="module")
def answers(demo: tuple[Any, Any]) -> dict[str, str]:
    """transformers' own greedy answers, of at most 12 tokens."""
    return {q: greedy_chat(*demo, [{"role": "user", "content": q}], 12) for q in QUESTIONS}


def chat(client: Any, smol: Served, question: str = QUESTIONS[0], **options: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 12} | options
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=smol.name, messages=messages, **given)


def test_four_clients(client: Any, smol: Served, answers: dict[str, str]) -> None:
    """Prompts of several lengths, whose answers join and leave the steps of others."""
    found: dict[str, str] = {}

    def ask(question: str) -> None:
        found[question] = chat(client, smol, question).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(question,)) for question in QUESTIONS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == answers


def test_seeds(client: Any, smol: Served) -> None:
    def told(**options: Any) -> str:
        return str(chat(client, smol, temperature=1.5, **options).choices[0].message.content)

    assert told(seed=1) == told(seed=1) != told(seed=2)
    # One token to choose from is the likeliest.
    greedy = chat(client, smol).choices[0].message.content
    for one in ({"top_p": 0}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}):
        assert told(**one) == greedy


def test_characters_come_whole(client: Any, smol: Served) -> None:
    """An emoji is several tokens; no chunk has a part of one."""
    prompt = "\U0001f980\U0001f980\U0001f980 \U0001f984\U0001f984" * 6
    given = {"model": smol.name, "prompt": prompt, "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**given)
    chunks = list(client.completions.create(**given, stream=True))
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == whole.choices[0].text and "�" not in whole.choices[0].text
    shown = [text for text in texts if text]
    assert max(map(ord, "".join(shown))) > 0xFFFF and len(shown) < whole.usage.completion_tokens


def test_completions_go_on_from_text_and_tokens(client: Any, smol: Served, demo: Any) -> None:
    text = "The capital of France is"
    ids = demo[1](text).input_ids
    texts = [
        client.completions.create(model=smol.name, prompt=prompt, temperature=0).choices[0].text
        for prompt in (text, ids)
    ]
    assert texts[0] == texts[1] and "Paris" in texts[0]


def test_models(client: Any, smol: Served) -> None:
    assert [model.id for model in client.models.list()] == [smol.name]
    assert client.models.retrieve(smol.name).id == smol.name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# ---- a client that goes


def busy(smol: Served) -> bool:
    return bool(smol.ask("/health")[2]["busy"])


def is_free_soon(smol: Served) -> bool:
    end = time.monotonic() + 30
    while busy(smol) and time.monotonic() < end:
        time.sleep(0.05)
    return not busy(smol)


@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
def test_a_client_that_goes_frees_its_place(client: Any, smol: Served, stream: bool) -> None:
    """Left to itself, the answer takes minutes."""
    given = ENDLESS | {"model": smol.name, "stream": stream}
    if stream:
        answer = client.completions.create(**given)
        next(iter(answer))
        assert busy(smol)
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**given, timeout=2)
    assert is_free_soon(smol)


def test_the_queue_is_bounded(client: Any, smol: Served) -> None:
    """4 are answered, 2 wait, and the next is refused."""
    given = ENDLESS | {"model": smol.name, "stream": True}
    taken = [client.completions.create(**given) for _ in range(6)]
    try:
        with pytest.raises(openai.RateLimitError) as refused:
            chat(client, smol)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.body["type"] == "rate_limit_error"
    finally:
        for answer in taken:
            answer.close()
    assert is_free_soon(smol)

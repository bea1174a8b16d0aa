"""Fields of requests to `metalmm serve`: how tokens are chosen, how many, and what is told."""

from __future__ import annotations

import copy
import json
import logging
import math
import urllib.request
from contextlib import closing
from typing import Any

import pytest
import torch
from answered import Asked, answered, run
from serving import CONTEXT, KEY, Served

from torch_metalmm.tools.chat.template import Template
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.choosing import Chooser
from torch_metalmm.tools.serve.engine import Runner
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.prompts import Prompts
from torch_metalmm.tools.serve.schema import (
    IGNORED,
    Chat,
    Completion,
    Embedding,
    parse,
    warn_once,
)
from torch_metalmm.tools.serve.weights import Bias, Scored, Scores
from torch_metalmm.tools.writing import Options

pytest.importorskip("pydantic")

IDS = [3, 4, 5]


def complete(tiny: Served, **fields: Any) -> Any:
    body = {"prompt": "ab", "max_tokens": 6, "temperature": 0} | fields
    status, _, told = tiny.ask("/v1/completions", body)
    assert status == 200, told
    return told


def events(tiny: Served, **fields: Any) -> list[Any]:
    """What a stream sends in place of complete()'s answer."""
    body = {"prompt": "ab", "max_tokens": 6, "temperature": 0, "stream": True} | fields
    headers = {"Authorization": f"Bearer {KEY}"}
    where, data = f"{tiny.url}/v1/completions", json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(where, data, headers), timeout=120) as found:
        lines = [line.decode().strip() for line in found if line.startswith(b"data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# ---- what a request adds to logits


def test_penalties_and_biases() -> None:
    """Those of the answer's tokens, not of the prompt's; as OpenAI defines them."""
    torch.manual_seed(0)
    logits, ids = torch.randn(1, 9), torch.tensor([[1, 1, 2, 5, 2, 2]])
    biases, frequency, presence = {2: -100.0, 7: 3.5}, 0.5, -1.25
    found = Bias(3, biases, frequency, presence)(ids, logits)
    for token in range(9):
        times = [5, 2, 2].count(token)
        wanted = logits[0, token].double() + biases.get(token, 0.0)
        wanted -= times * frequency + (times > 0) * presence
        # Two roundings of numbers below 128.
        assert abs(found[0, token].double() - wanted) <= 2 * 128 * 2**-24


def test_a_penalty_comes_before_biases() -> None:
    """In shared steps as in generate()."""
    options = Options(repeat_penalty=2.0, bias=lambda _, logits: logits + torch.tensor([3.0, 0.0]))
    chooser = Chooser(options, None, torch.device("cpu"))
    assert chooser.choose(torch.tensor([[4.0, 4.0]]), [0]) == 0


def test_they_choose_the_tokens(runner: Runner) -> None:
    """A token that is pushed comes each time; with a penalty for what came none comes twice."""
    seen = list[list[int]]()

    def spied(bias: Bias, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return bias(ids, logits)

    for bias, repeats in ((Bias(3, {9: 100}, 0, 0), True), (Bias(3, {}, 2000.0, 0), False)):
        run(runner, Asked(IDS, 8, bias=lambda *given, bias=bias: spied(bias, *given)))
        came = seen[-1][3:]
        assert ({*came} == {9} and len(came) == 7) if repeats else len({*came}) == len(came) > 0


@pytest.mark.parametrize(
    "value", (math.nan, math.inf, -math.inf, 10**400), ids=lambda v: f"{v}"[:4]
)
@pytest.mark.parametrize("name", ("frequency_penalty", "presence_penalty", "logit_bias", "top_p"))
def test_no_numbers(name: str, value: float) -> None:
    given = {"1": value} if name == "logit_bias" else value
    with pytest.raises(ApiError, match=f"^{name}: "):
        Completion(prompt="a", **{name: given}).check()


# ---- what is told of them


def test_scores() -> None:
    """Logarithms of shares, by float64; a number that JSON has not is OpenAI's least one."""
    torch.manual_seed(1)
    logits, told = 5 * torch.randn(1, 50), list[Scored]()
    logits[0, 7] = -torch.inf
    for token in (7, 8):
        Scores(3, told.append)(token, logits)
    wanted = logits[0].double().log_softmax(0)
    assert told[0].share == -9999.0 and told[0].top == told[1].top
    assert [token for token, _ in told[1].top] == wanted.topk(3).indices.tolist()
    for token, share in [*told[1].top, (8, told[1].share)]:
        # exp, 49 sums, log and two differences of numbers below 32, each rounded once.
        assert abs(share - float(wanted[token])) <= (50 + 4 * 32) * 2**-24


def test_scores_of_answers(loaded: tuple[Any, Any]) -> None:
    """Each token has its own, before its text; they are the model's own, without a bias."""
    job = Asked(IDS, 5, bias=Bias(3, {9: 100}, 0, 0))
    job.options.scores = Scores(1, job.told.append)
    answered(Batch(*loaded, 1), job)
    assert isinstance(job.told[0], Scored)
    scored = [one for one in job.told if isinstance(one, Scored)]
    assert len(scored) == 5 and {one.token for one in scored} == {9}
    for one, row in zip(scored, job.logits, strict=True):
        assert one.top[0][0] == int(row[0].argmax()) != 9 and one.share < one.top[0][1]


@pytest.mark.parametrize("stream", (False, True))
def test_logprobs_of_completions(tiny: Served, stream: bool) -> None:
    fields = {"logprobs": 2, "temperature": 1, "seed": 1}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(tiny, **fields)]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        found = {name: sum((part[name] for part in parts), []) for name in parts[0]}
        text = "".join(choice["text"] for choice in choices)
    else:
        (choice,) = complete(tiny, **fields)["choices"]
        found, text = choice["logprobs"], choice["text"]
    count = len(found["tokens"])
    assert count and all(len(found[name]) == count for name in found)
    assert "".join(found["tokens"]) == text
    for i, (token, offset) in enumerate(zip(found["tokens"], found["text_offset"], strict=True)):
        assert offset == len("".join(found["tokens"][:i]))
        tops = found["top_logprobs"][i]
        assert 0 < len(tops) <= 2 and sum(map(math.exp, tops.values())) <= 1
        assert found["token_logprobs"][i] <= tops.get(token, max(tops.values()))


# ---- several answers


def test_several_answers(tiny: Served) -> None:
    """Of each prompt n, in order; seeds differ, and make the same answers again."""
    fields = {"prompt": ["ab", "ba"], "n": 3, "seed": 5, "temperature": 1}
    told = complete(tiny, **fields)
    texts = [choice["text"] for choice in told["choices"]]
    assert [choice["index"] for choice in told["choices"]] == [*range(6)]
    assert len({*texts[:3]}) == len({*texts[3:]}) == 3
    alone = [complete(tiny, **fields | {"prompt": p, "n": 1}) for p in ("ab", "ba")]
    assert texts[0] == alone[0]["choices"][0]["text"]
    prompts = sum(one["usage"]["prompt_tokens"] for one in alone)
    assert told["usage"]["prompt_tokens"] == prompts
    assert [choice["text"] for choice in complete(tiny, **fields)["choices"]] == texts
    chunks = events(tiny, **fields, stream_options={"include_usage": True})
    streamed = [""] * 6
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts and chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] == prompts and "cached_tokens" in usage["prompt_tokens_details"]
    assert usage["completion_tokens"] == told["usage"]["completion_tokens"]


def test_echo(tiny: Served) -> None:
    for prompt, shown in (("ab", "ab"), ([97, 98], None)):
        (plain,) = complete(tiny, prompt=prompt)["choices"]
        (choice,) = complete(tiny, prompt=prompt, echo=True)["choices"]
        before = choice["text"].removesuffix(plain["text"])
        assert before == (shown or before) != ""
        chunks = events(tiny, prompt=prompt, echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_no_limit(tiny: Served) -> None:
    told = complete(tiny, max_tokens=-1, logit_bias={"9": 100})
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["total_tokens"] == CONTEXT


# ---- what prompts are made of


def test_variables_of_the_chat_template(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ b }}"
    monkeypatch.setattr(loaded[1], "chat_template", text)
    low: Any = {"reasoning_effort": "low"}
    with closing(Template()) as template:
        prompts = Prompts(*loaded, template, None, None)
        for fields, wanted in (
            ({}, "||"),
            ({"reasoning_effort": "none"}, "False|none|"),
            (low, "True|low|"),
            (low | {"chat_template_kwargs": {"enable_thinking": False, "b": 3}}, "False|low|3"),
        ):
            given = Chat(messages=[{"role": "user", "content": "Hi"}], **fields)
            given.check()
            assert prompts.of_chat(given).text == wanted


def test_a_text_with_a_gap(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = copy.deepcopy(loaded)
    given = Completion(prompt="a", suffix="b")
    given.check()
    with pytest.raises(ApiError, match="^suffix: the model fills no gaps"):
        Prompts(model, tokenizer, Template(), None, None).of_completion(given)
    words = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.add_tokens(words, special_tokens=True)
    model.config.vocab_size = len(tokenizer)
    (prompt,) = Prompts(model, tokenizer, Template(), None, None).of_completion(given)
    before, after, gap = tokenizer.convert_tokens_to_ids(words)
    ids, (a,), (b,) = prompt.ids, *(tokenizer(x, add_special_tokens=False).input_ids for x in "ab")
    assert ids[-5:] == [before, a, after, b, gap]


def test_fields_that_change_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """They are ignored, and the log says so once; null is as nothing."""
    warn_once.cache_clear()
    body = b'{"prompt": "a", "store": true, "user": {"a": [1]}, "metadata": null, "other": null}'
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert parse(Completion, body).prompt == "a"
    said = [record.message.partition(":")[0] for record in caplog.records]
    assert sorted(said) == ["store", "user"] and {*said} < IGNORED


def test_any_model_s_name(tiny: Served) -> None:
    told = complete(tiny)
    for name in ("other", None, ""):
        again = complete(tiny, model=name)
        assert again["choices"] == told["choices"] and again["model"] == "tiny"


def test_metrics(tiny: Served) -> None:
    def told() -> dict[str, float]:
        status, headers, text = tiny.ask("/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    complete(tiny)
    before = told()
    usage = complete(tiny)["usage"]
    tiny.ask("/v1/completions", b"{")
    tiny.ask('/v1/a"b')
    while (after := told())["metalmm_busy"]:  # an answer is told before its step ends
        pass

    def grown(name: str) -> float:
        return after[f"metalmm_{name}"] - before.get(f"metalmm_{name}", 0)

    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generated_tokens_total") == usage["completion_tokens"]
    assert grown('requests_total{route="/v1/completions",status="200"}') == 1
    assert grown('requests_total{route="/v1/completions",status="400"}') == 1
    assert grown("first_token_seconds_count") == 1 and grown("first_token_seconds_sum") > 0
    assert not any('a"b' in name for name in after)


# ---- bodies, before the model comes


def test_a_text_with_a_token_beyond_the_models(loaded: tuple[Any, Any]) -> None:
    """Tokenizers may have more tokens than the model has rows."""
    model, tokenizer = loaded
    tokenizer.add_tokens(["<beyond>"])
    assert len(tokenizer) > model.config.vocab_size
    tokenizer.chat_template = "{{ messages[0].content }}"
    with closing(Template()) as template:
        prompts = Prompts(model, tokenizer, template, None, None)
        messages = [{"role": "user", "content": "a<beyond>"}]
        for name, tokens in (
            ("prompt", lambda: prompts.of_completion(Completion(prompt=["a<beyond>"]))),
            ("messages", lambda: prompts.of_chat(Chat(model="m", messages=messages))),
        ):
            with pytest.raises(ApiError, match=f"{name}: token .* must be from 0") as error:
                tokens()
            assert (error.value.status, error.value.param) == (400, name)
        tokenizer.chat_template = "{{ '\\ud800' }}"
        with pytest.raises(ApiError, match="messages: the text has half a surrogate pair"):
            prompts.of_chat(Chat(messages=messages))


MANY = 50_000
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    (
        (Completion, "prompt", [{}] * MANY),
        (Completion, "prompt", ["a"] + [1] * MANY),
        (Completion, "prompt", [True]),
        (Completion, "prompt", 3),
        (Completion, "stop", [1] * MANY),
        (Completion, "stop", 1),
        (Completion, "logit_bias", {str(i): "a" for i in range(MANY)}),
        (Chat, "messages", [1] * MANY),
        (Chat, "messages", "Hi"),
        (Chat, "tools", [[]] * MANY),
        (Chat, "response_format", [1] * MANY),
        (Embedding, "input", [{}] * MANY),
        (Embedding, "input", [[{}]] * MANY),
        (Embedding, "input", [[1.5] * MANY]),
        (Embedding, "input", ["a", [1]]),
    ),
)
def test_lists_of_wrong_items(kind: Any, name: str, value: Any) -> None:
    """One error is worded, and not one for each item: 20 s of a body of 1.2 MB."""
    given = {"model": "m", name: value}
    needed = {Completion: {"prompt": "a"}, Chat: {"messages": MESSAGES}, Embedding: {"input": "a"}}
    with pytest.raises(ApiError, match=f"^{name}") as error:
        found = parse(kind, json.dumps(needed[kind] | given).encode())
        found.inputs() if kind is Embedding else found.check()
    assert (error.value.status, error.value.param) == (400, name)
    cause = error.value.__context__
    assert cause is None or cause.error_count() < 4


def test_many_unknown_fields() -> None:
    body = {"model": "m", "prompt": "a"} | {f"x{i}": 1 for i in range(1000)}
    with pytest.raises(ApiError, match="^x0: it is not known") as error:
        parse(Completion, json.dumps(body).encode())
    assert error.value.code == "unsupported" and error.value.__context__ is None


def test_texts_and_tokens() -> None:
    """What may be given, as what it is taken."""
    for given, taken in (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"],) * 2, ([[1], [2]],) * 2):
        assert Embedding(model="m", input=given).inputs() == taken
    for given, taken in (("a", ["a"]), (["a", "b"],) * 2, ([1, 2], [[1, 2]])):
        asked = Completion(model="m", prompt=given, stop="x")
        asked.check()
        assert (asked.prompt, asked.stops()) == (taken, ["x"])

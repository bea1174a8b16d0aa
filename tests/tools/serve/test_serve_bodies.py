"""Bodies of requests to `metalmm serve`: what is made of them before the model comes."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest

from torch_metalmm.tools.chat.template import Template
from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.prompts import Prompts
from torch_metalmm.tools.serve.schema import Chat, Completion, Embedding, parse

pytest.importorskip("pydantic")


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

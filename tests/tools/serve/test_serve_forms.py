"""Answers of a form: the tokens that a random model may choose are those of the form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from answered import Asked, run
from backends import CASES
from gguf_files import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served

from torch_metalmm import load_gguf
from torch_metalmm.tools.serve.calling import Wanted, calls_of
from torch_metalmm.tools.serve.choosing import Chooser
from torch_metalmm.tools.serve.engine import Runner
from torch_metalmm.tools.serve.forms import Forms
from torch_metalmm.tools.writing import Options

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "year": {"type": "integer", "maximum": 99}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
JSON = Wanted("response_format", "json", json.dumps(SCHEMA))
REGEX = Wanted("regex", "regex", "(ab|cd){3}")
LARK = Wanted("grammar", "grammar", 'start: "x" WORD\nWORD: /[0-9]{2}/')
IDS = [3, 4, 5]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load_gguf(random_model(tmp_path_factory.mktemp("m") / "m.gguf", "llama"))


def answers(runner: Any, loaded: tuple[Any, Any], *wanted: Wanted | None) -> list[str]:
    """Of one prompt, together where the runner takes them so."""
    made = Forms(*loaded)
    forms = [None if want is None else made.of(want, "", len(IDS)) for want in wanted]
    jobs = [Asked(IDS, 80, i, temperature=1.0, form=form) for i, form in enumerate(forms)]
    run(runner, *jobs)
    assert all(job.finish for job in jobs)
    return ["".join(job.texts) for job in jobs]


def test_answers_have_their_forms(loaded: tuple[Any, Any], runner: Runner) -> None:
    """Beside one of none, which is what it is alone."""
    free, of_schema, of_regex, of_lark = answers(runner, loaded, None, JSON, REGEX, LARK)
    jsonschema.validate(json.loads(of_schema), SCHEMA)
    assert re.fullmatch("(ab|cd){3}", of_regex) and re.fullmatch("x[0-9]{2}", of_lark)
    assert answers(runner, loaded, None) == [free]


def test_a_thought_that_the_prompt_opens_is_free(loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    form = Forms(*loaded).of(REGEX, "... <think>\n", 0)
    thought = tokenizer("any 1 </think>", add_special_tokens=False).input_ids
    logits = torch.zeros(1, len(tokenizer))
    for i in range(len(thought)):
        assert torch.equal(form(torch.tensor([thought[:i]], dtype=torch.long), logits), logits)
    allowed = form(torch.tensor([thought]), logits)[0].isfinite().nonzero().flatten().tolist()
    assert allowed and all("abcd".find(tokenizer.decode([i])) in (0, 2) for i in allowed)


def test_an_answer_ends_with_the_model_s_own_tokens(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the tokenizer's; after a token that its form has not it fails."""
    model, tokenizer = loaded
    monkeypatch.setattr(model.generation_config, "eos_token_id", [7, 9])
    ids, logits = tokenizer("ababab", add_special_tokens=False).input_ids, torch.zeros(1, 320)
    form = Forms(*loaded).of(REGEX, "", 0)
    allowed = form(torch.tensor([ids]), logits)[0].isfinite().nonzero().flatten().tolist()
    assert allowed == [7, 9]
    form = Forms(*loaded).of(REGEX, "", 0)
    other = tokenizer("x", add_special_tokens=False).input_ids
    with pytest.raises(RuntimeError, match="the form of the answer"):
        form(torch.tensor([other]), logits)


# ---- calls of functions

PLACE = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/place"}},
    "required": ["where"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Oslo", "Rome"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "go", "strict": True, "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop"}},
]


def test_calls_that_must_come(loaded: tuple[Any, Any], runner: Runner) -> None:
    """Of any function, of one by its name; arguments are those of its schema."""
    named = {"type": "function", "function": {"name": "go"}}
    for choice, names in (("required", {"go", "stop"}), (named, {"go"})):
        wanted = [calls_of(TOOLS, choice, True).form()] * 4
        calls = [json.loads(text) for text in answers(runner, loaded, *wanted)]
        assert {call["name"] for call in calls} <= names
        for call in calls:
            jsonschema.validate(call["arguments"], PLACE if call["name"] == "go" else {"const": {}})


@pytest.mark.parametrize("between", ("", "\n"))
def test_strict_calls_that_may_come(loaded: tuple[Any, Any], between: str) -> None:
    """Text is free; after each mark the arguments of a strict function are those of its schema."""
    tokenizer = loaded[1]
    form = Forms(*loaded).of(calls_of(TOOLS, None, True).form(), "", 0)
    ids, logits = list[int](), torch.zeros(1, len(tokenizer))

    def after(text: str) -> set[str]:
        """The tokens that may come after more text."""
        ids.extend(tokenizer(text, add_special_tokens=False).input_ids)
        found = form(torch.tensor([ids], dtype=torch.long), logits)[0].isfinite()
        return {tokenizer.decode([i]) for i in found.nonzero().flatten().tolist()}

    everything = {tokenizer.decode([i]) for i in range(len(tokenizer))}
    for call in ('{"name": "go", "arguments": {"where": "Rome"', '{"name": "stop", "arguments": {'):
        assert after("I do. ") == everything
        assert after("<tool_call>") < everything
        assert "}" in after(between + call) < everything
        assert "}" in after("}") < everything
        assert after("}") == everything


def test_a_token_that_ends_a_mark_and_begins_a_call(tmp_path: Path) -> None:
    model, tokenizer = load_gguf(random_model(tmp_path / "m.gguf", "llama"))
    tokenizer.add_tokens(['l>{"na', "l>[1"])
    model.config.vocab_size = len(tokenizer)
    ids = tokenizer('<tool_call>{"na', add_special_tokens=False).input_ids
    assert ids[-1] == len(tokenizer) - 2
    logits = torch.zeros(1, len(tokenizer))
    form = Forms(model, tokenizer).of(calls_of(TOOLS, None, True).form(), "", 0)
    found = form(torch.tensor([ids]), logits)[0].isfinite().nonzero().flatten().tolist()
    assert found and all("me".startswith(tokenizer.decode([i])[:1]) for i in found)
    form = Forms(model, tokenizer).of(calls_of(TOOLS, None, True).form(), "", 0)
    with pytest.raises(RuntimeError, match="the form of the answer"):
        form(torch.tensor([[*ids[:-1], len(tokenizer) - 1]]), logits)


# ---- JSON of any schema

_SCALARS: Any = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-99, 0), st.integers(0, 99)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}
    ),
    st.integers(0, 5).map(lambda n: {"type": "string", "minLength": n // 2, "maxLength": n}),
    st.lists(
        st.one_of(st.integers(-(2**53), 2**53), st.text('äb"\\ \n', max_size=3), st.none()),
        min_size=1,
    ).map(lambda values: {"enum": values}),
    st.sampled_from(["[a-c]{1,3}", "(x|yz)?", "\\d{2}-\\d"]).map(
        lambda text: {"type": "string", "pattern": f"^{text}$"}
    ),
)


def _nested(inner: Any) -> Any:
    objects = st.dictionaries(st.text("abc_ é", min_size=1, max_size=3), inner, max_size=3)
    return st.one_of(
        st.tuples(objects, st.booleans()).map(
            lambda made: {
                "type": "object",
                "properties": made[0],
                "required": [*made[0]] if made[1] else [],
                "additionalProperties": False,
            }
        ),
        st.tuples(inner, st.integers(0, 3)).map(
            lambda made: {"type": "array", "items": made[0], "maxItems": made[1]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda kinds: {"anyOf": kinds}),
    )


@settings(max_examples=1000 if CASES == "all" else 100, deadline=None)
@given(schema=st.recursive(_SCALARS, _nested, max_leaves=6), seed=st.integers(0, 99))
def test_json_of_random_schemas_parses_and_validates(
    loaded: tuple[Any, Any], schema: Any, seed: int
) -> None:
    model, tokenizer = loaded
    form = Forms(model, tokenizer).of(Wanted("", "json", json.dumps(schema)), "", 0)
    chooser = Chooser(Options(temperature=1.0, form=form), seed, model.device)
    ends, tokens = {model.generation_config.eos_token_id}, list[int]()
    while not (ends & {*tokens}):
        assert len(tokens) < 500
        tokens.append(chooser.choose(torch.zeros(1, len(tokenizer)), tokens))
    jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), schema)


def test_a_chat_with_a_call(smol: Served) -> None:
    """Of a model that knows of none: it must come, and its place in the answer is a call's."""
    question = {"role": "user", "content": "Where to?"}
    body = {"messages": [question], "temperature": 0, "tools": TOOLS, "tool_choice": "required"}
    status, _, told = smol.ask("/v1/chat/completions", body | {"logprobs": True, "n": 2})
    assert status == 200
    for choice in told["choices"]:
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert "".join(one["token"] for one in choice["logprobs"]["content"])[:9] == '{"name": '

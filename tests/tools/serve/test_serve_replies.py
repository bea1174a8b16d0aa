"""Answers of `metalmm serve` as messages: thoughts, calls of functions, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest

from torch_metalmm.tools.serve.engine import Finish
from torch_metalmm.tools.serve.replies import ChatReply


def test_thoughts_and_calls_are_apart() -> None:
    """Whichever pieces they come in; arguments are JSON in a text, as clients expect."""
    text = (
        "<think>Hm.</think>I ask.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    )
    for size in (1, 7, len(text)):
        reply = ChatReply("m", "", takes_calls=True)
        chunks = []
        for start in range(0, len(text), size):
            chunks += list(reply.feed(text[start : start + size]))
        finish = Finish("stop", 3, 0, 4)
        chunks += list(reply.end(finish))
        choice = reply.whole(finish)["choices"][0]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "I ask.")
        calls = [call["function"] for call in message["tool_calls"]]
        assert [call["name"] for call in calls] == ["weather", "time"]
        assert calls[0]["arguments"] == '{"city": "Oslo"}'
        assert choice["finish_reason"] == "tool_calls"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        streamed = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
        assert [call["index"] for call in streamed] == [0, 1]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."


def test_what_looks_like_a_call_stays_text() -> None:
    reply = ChatReply("m", "", takes_calls=True)
    finish = Finish("stop", 1, 0, 1)
    text = "<tool_call>weather, please</tool_call>"
    for _ in [*reply.feed(text), *reply.end(finish)]:
        pass
    choice = reply.whole(finish)["choices"][0]
    assert choice["message"]["content"] == "weather, please" and choice["finish_reason"] == "stop"


def told(text: str, size: int, takes_calls: bool = True) -> dict[str, Any]:
    """The choice of an answer that comes in pieces of this size."""
    reply, finish = ChatReply("m", "", takes_calls), Finish("stop", 1, 0, 1)
    for start in range(0, len(text), size):
        for _ in reply.feed(text[start : start + size]):
            pass
    for _ in reply.end(finish):
        pass
    choice: dict[str, Any] = reply.whole(finish)["choices"][0]
    return choice


@pytest.mark.parametrize("size", (1, 9, 1000))
def test_adjacent_calls(size: int) -> None:
    """Nothing need stand between them; ids are 9 letters or digits, as Mistral's templates ask."""
    calls = [f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(3)]
    message = told("".join(calls), size)["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f0", "f1", "f2"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 3 and all(len(id) == 9 and id.isalnum() for id in ids)


def test_calls_that_nobody_asked_for_are_text() -> None:
    text = 'I would <tool_call>{"name": "f", "arguments": {}}</tool_call>, [TOOL_CALLS] or so'
    choice = told(text, 5, takes_calls=False)
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("value", ("NaN", "-Infinity", "1e999", '"\\ud800"'))
def test_arguments_that_are_no_json(value: str) -> None:
    call = f'{{"name": "f", "arguments": {{"x": {value}}}}}'
    choice = told(f"<tool_call>{call}</tool_call>", 1000)
    assert choice["message"]["content"] == call and choice["finish_reason"] == "stop"

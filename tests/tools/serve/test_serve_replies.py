"""Answers of `metalmm serve` as messages: thoughts, calls of functions, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest

from torch_metalmm.tools.serve.calling import Calls
from torch_metalmm.tools.serve.engine import Finish
from torch_metalmm.tools.serve.replies import ChatReply

NO_CALLS = Calls(None, [], is_forced=False, are_many=True)
CALLS = Calls([{}], [], is_forced=False, are_many=True)
ONE_CALL = Calls([{}], [], is_forced=False, are_many=False)
FORCED = Calls([{}], [], is_forced=True, are_many=False)


def told(text: str, size: int, calls: Calls = CALLS, prompt: str = "") -> tuple[Any, list[Any]]:
    """(the choice of an answer that comes in pieces of this size, its chunks)."""
    reply = ChatReply(0, str, prompt, calls)
    chunks = []
    for start in range(0, len(text), size):
        chunks += list(reply.feed(text[start : start + size]))
    chunks += list(reply.feed(Finish("stop", 1, 0, 1)))
    return reply.whole(), chunks


def test_thoughts_and_calls_are_apart() -> None:
    """Whichever pieces they come in; arguments are JSON in a text, as clients expect."""
    text = (
        "<think>Hm.</think>I ask.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    )
    for size in (1, 7, len(text)):
        choice, chunks = told(text, size)
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "I ask.")
        calls = [call["function"] for call in message["tool_calls"]]
        assert [call["name"] for call in calls] == ["weather", "time"]
        assert calls[0]["arguments"] == '{"city": "Oslo"}'
        assert choice["finish_reason"] == "tool_calls"
        deltas = [chunk["delta"] for chunk in chunks]
        streamed = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
        assert [call["index"] for call in streamed] == [0, 1]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."


def test_what_looks_like_a_call_stays_text() -> None:
    choice, _ = told("<tool_call>weather, please</tool_call>", 1000)
    assert choice["message"]["content"] == "weather, please" and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("size", (1, 9, 1000))
def test_adjacent_calls(size: int) -> None:
    """Nothing need stand between them; ids are 9 letters or digits, as Mistral's templates ask."""
    calls = [f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(3)]
    text = "".join(calls)
    made = told(text, size)[0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in made] == ["f0", "f1", "f2"]
    ids = [call["id"] for call in made]
    assert len(set(ids)) == 3 and all(len(id) == 9 and id.isalnum() for id in ids)
    (one,) = told(text, size, ONE_CALL)[0]["message"]["tool_calls"]
    assert one["function"]["name"] == "f0"


def test_calls_that_nobody_asked_for_are_text() -> None:
    text = 'I would <tool_call>{"name": "f", "arguments": {}}</tool_call>, [TOOL_CALLS] or so'
    choice, _ = told(text, 5, NO_CALLS)
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("value", ("NaN", "-Infinity", "1e999", '"\\ud800"'))
def test_arguments_that_are_no_json(value: str) -> None:
    call = f'{{"name": "f", "arguments": {{"x": {value}}}}}'
    choice, _ = told(f"<tool_call>{call}</tool_call>", 1000)
    assert choice["message"]["content"] == call and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ("", "... <tool_call>\n", "... <think>\n"))
@pytest.mark.parametrize("size", (1, 1000))
def test_a_call_that_must_come_has_no_marks(prompt: str, size: int) -> None:
    """Those in its arguments are text; what the prompt opens may be a thought before it."""
    call = '{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}'
    thought = "Hm.</think>" if "think" in prompt else ""
    choice, _ = told(thought + call, size, FORCED, prompt)
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["arguments"] == '{"x": "</tool_call><tool_call>"}'
    assert choice["message"].get("reasoning_content", "") == thought.removesuffix("</think>")
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")

"""Answers of `metalmm serve` as messages: thoughts, calls of functions, and what is neither."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_metalmm.tools.serve.calling import Calls
from torch_metalmm.tools.serve.engine import Prompt
from torch_metalmm.tools.serve.errors import ApiError, naming
from torch_metalmm.tools.serve.messages import MessageReply
from torch_metalmm.tools.serve.ollama import OllamaChat, OllamaReply
from torch_metalmm.tools.serve.replies import ChatChoices, Choice
from torch_metalmm.tools.serve.responses import ResponseReply, Responses
from torch_metalmm.tools.writing import Finish

NO_CALLS = Calls(None, [], is_forced=False, are_many=True)
CALLS = Calls([{}], [], is_forced=False, are_many=True)
ONE_CALL = Calls([{}], [], is_forced=False, are_many=False)
FORCED = Calls([{}], [], is_forced=True, are_many=False)


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def told(text: str, size: int, calls: Calls = CALLS, prompt: str = "") -> tuple[Any, list[Any]]:
    """(the choice of an answer that comes in pieces of this size, its chunks)."""
    reply = ChatChoices("m", [Choice(str, prompt, calls)], 1, False)
    *events, done = streamed(reply, text, size, Finish("stop", 1, 0, 1))
    (choice,) = reply.whole()["choices"]
    return choice, [event["choices"][0] for event in events]


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


# ---- the same as blocks

THOUGHT_AND_CALLS = (
    "<think>Hm.</think>\n\nI ask.\n"
    '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n'
)


def streamed(reply: Any, text: str, size: int, end: Finish) -> list[Any]:
    """The events of an answer that comes in pieces of this size."""
    events = [*reply.first()]
    for piece in pieces(text, size):
        events += reply.feed(0, piece)
    events += [*reply.feed(0, end), *reply.last()]
    return [json.loads(event.partition("data: ")[2].replace("[DONE]", "null")) for event in events]


@pytest.mark.parametrize("size", (1, 7, 1000))
def test_blocks_of_messages(size: int) -> None:
    """What a client makes of the events is the whole; nothing is a block of space alone."""
    reply = MessageReply("m", Prompt("", [1], 1), Choice(str, "", CALLS), [])
    events = streamed(reply, THOUGHT_AND_CALLS, size, Finish("stop", 9, 4, 5))
    blocks, texts = list[Any](), list[str]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        if event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            texts[-1] += text
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        else:
            block[block["type"]] += text
    whole = reply.whole()
    assert blocks == whole["content"]
    kinds = [block["type"] for block in blocks]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert (texts[0], texts[1].strip(), blocks[2]["input"]) == ("Hm.", "I ask.", {"x": 1})
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
    }


@pytest.mark.parametrize("size", (1, 7, 1000))
def test_items_of_responses(size: int) -> None:
    reply = ResponseReply("m", Responses(input="a"), Choice(str, "", CALLS))
    events = streamed(reply, THOUGHT_AND_CALLS, size, Finish("stop", 9, 4, 5))
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] == reply.whole()["output"]
    kinds = [item["type"] for item in done]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    deltas = [e for e in events if e["type"].endswith(".delta")]
    for i, item in enumerate(done):
        text = "".join(e["delta"] for e in deltas if e["output_index"] == i)
        assert text == item.get("arguments", "") or text == item["content"][0]["text"] != ""
        assert {e["item_id"] for e in deltas if e["output_index"] == i} == {item["id"]}
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize(("stop", "told"), (("ab", "stop_sequence"), ("</tool_call>", "end_turn")))
def test_strings_that_end_a_message(stop: str, told: str) -> None:
    """One that the client did not give is not named."""
    reply = MessageReply("m", Prompt("", [1], 1), Choice(str, "", ONE_CALL), ["ab"])
    streamed(reply, "Hi", 1, Finish("stop", 1, 0, 1, stop=stop))
    assert reply.whole()["stop_reason"] == told


@pytest.mark.parametrize("kind", (MessageReply, ResponseReply))
def test_errors_in_streams(kind: Any) -> None:
    first: Any = Prompt("", [1], 1) if kind is MessageReply else Responses(input="a")
    rest: Any = ([],) if kind is MessageReply else ()
    reply = kind("m", first, Choice(str, "", NO_CALLS), *rest)
    event, _, data = reply.failed(ApiError(500, "the model failed")).partition("data: ")
    told = json.loads(data)
    error = told["error"] if kind is MessageReply else told["response"]["error"]
    assert event == f"event: {told['type']}\n" and error["message"] == "the model failed"


def test_ollama_tells_thoughts_and_calls() -> None:
    """Whole and line by line, with nothing in a line at which clients split streams."""
    text = '<think>Hm.</think>I\u2028ask.\n<tool_call>{"name": "go", "arguments": '
    text += '{"city": "Oslo"}}</tool_call>'
    for size in (1, 7, len(text)):
        reply = OllamaReply("m", Choice(str, "", CALLS), OllamaChat().told)
        lines = [*reply.first()]
        for piece in pieces(text, size):
            lines += reply.feed(0, piece)
        lines += [*reply.feed(0, Finish("stop", 3, 0, 4)), *reply.last()]
        assert all(line.splitlines() == [line[:-1]] for line in lines)
        *parts, end = map(json.loads, lines)
        assert end["done"] and not any(part["done"] for part in parts)
        counts = {"done_reason": "stop", "prompt_eval_count": 3, "eval_count": 4}
        whole = reply.whole()
        assert counts.items() <= end.items() and counts.items() <= whole.items()
        message = whole["message"]
        told = [part["message"] for part in parts]
        assert "".join(one.get("thinking", "") for one in told) == message["thinking"] == "Hm."
        said = "".join(one["content"] for one in told)
        assert said.strip() == message["content"] == "I\u2028ask."
        calls = [call for one in told for call in one.get("tool_calls", [])]
        go = {"function": {"name": "go", "arguments": {"city": "Oslo"}}}
        assert calls == message["tool_calls"] == [go]
    assert json.loads(reply.failed(ApiError(500, "no"))) == {"error": "no"}


def test_results_of_ollama_find_their_calls() -> None:
    """By name, else in turn; ids are as Mistral's templates ask, or the client's."""
    calls = [{"function": {"name": name, "arguments": {"n": name}}} for name in "abc"]
    given = [{"role": "assistant", "tool_calls": calls}]
    given += [{"role": "tool", "content": "B", "tool_name": "b"}]
    given += [{"role": "tool", "content": content} for content in ("A", "C")]
    given += [{"role": "assistant", "tool_calls": [{"id": "mine", **calls[0]}], "thinking": "Hm."}]
    given += [{"role": "tool", "content": "D", "tool_call_id": "mine"}]
    first, *results, last, own = OllamaChat(messages=given).made().messages
    ids = {call["function"]["name"]: call["id"] for call in first["tool_calls"]}
    assert len({*ids.values()}) == 3 and all(len(i) == 9 and i.isalnum() for i in ids.values())
    assert [(r["name"], r["tool_call_id"], r["content"]) for r in results] == [
        (name, ids[name], name.upper()) for name in "bac"
    ]
    assert first["tool_calls"][0]["function"]["arguments"] == {"n": "a"}
    assert (last["reasoning_content"], last["tool_calls"][0]["id"]) == ("Hm.", "mine")
    assert (own["name"], own["tool_call_id"]) == ("a", "mine")


def test_options_of_ollama() -> None:
    """What means nothing there is left out; the rest has the names of chats."""
    options = {"num_predict": -2, "top_k": 0, "seed": -1, "repeat_last_n": None, "f16_kv": True}
    said = [{"role": "user", "content": "a"}]
    made = OllamaChat(messages=said, options=options).made()
    assert (made.max_tokens, made.top_k, made.seed) == (None, None, None)
    options = {"num_predict": 7, "repeat_penalty": 1.1, "stop": ["x"], "seed": 5}
    made = OllamaChat(messages=said, options=options, think="low").made()
    assert (made.max_tokens, made.repetition_penalty, made.stop, made.seed) == (7, 1.1, ["x"], 5)
    assert made.reasoning_effort == "low"
    for options, named in (({"num_predict": 0}, "num_predict"), ({"top_k": False}, "top_k")):
        with pytest.raises(ApiError, match=f"options: {named}"), naming(OllamaChat.names):
            OllamaChat(messages=said, options=options).made().check()

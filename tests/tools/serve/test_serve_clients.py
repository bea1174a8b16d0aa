"""`metalmm serve` with the packages that clients use: openai's responses, anthropic, ollama,
langchain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import KEY, Served

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
ASKED = {"role": "user", "content": QUESTION}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


# ---- openai's responses


def respond(client: Any, **fields: Any) -> Any:
    return client.responses.create(
        **{"model": "smol", "input": QUESTION, "temperature": 0} | fields
    )


def test_responses(client: Any) -> None:
    answer = respond(client)
    assert (answer.status, answer.output_text) == ("completed", ANSWER)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    # What was said before, of every kind.
    history = [
        {"role": "developer", "content": "Be brief."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "none"},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    cut = respond(client, input=history, instructions="You answer.", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 2 and cut.usage.input_tokens > answer.usage.input_tokens


def test_a_stream_of_responses(client: Any) -> None:
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER and len(deltas) > 3
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[4:] == ["output_text.delta"] * len(deltas) + ends
    assert events[-1].response.output_text == ANSWER
    with client.responses.stream(model="smol", input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_calls_of_responses(client: Any) -> None:
    tools = [{"type": "function", "name": "go", "parameters": SCHEMA}, {"type": "web_search"}]
    given = {"tools": tools, "tool_choice": "required"}
    (call,) = respond(client, **given).output
    assert (call.type, call.name, call.status) == ("function_call", "go", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    events = list(respond(client, **given, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events][2:]
    call_events = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == ["output_item.added", *call_events, "output_item.done", "completed"]
    assert json.loads(events[3].delta) == json.loads(events[-1].response.output[0].arguments)


def test_responses_of_a_schema(client: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}
    assert json.loads(respond(client, text=text).output_text)["city"] in ("Oslo", "Rome")


# ---- anthropic


@pytest.fixture(scope="module")
def anthropic(smol: Served) -> Iterator[Any]:
    module = pytest.importorskip("anthropic")
    with module.Anthropic(base_url=smol.url, api_key=KEY, max_retries=0) as found:
        yield found


GREEDY = {"model": "smol", "messages": [ASKED], "max_tokens": 30}
GREEDY["extra_body"] = {"temperature": 0}  # of which the package knows no more


def message(anthropic: Any, **fields: Any) -> Any:
    return anthropic.messages.create(**GREEDY | fields)


def test_messages(anthropic: Any) -> None:
    answer = message(anthropic)
    (block,) = answer.content
    assert (block.type, block.text, answer.stop_reason) == ("text", ANSWER, "end_turn")
    usage = answer.usage
    count = anthropic.messages.count_tokens(model="smol", messages=[ASKED]).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count > 0
    cut = message(anthropic, max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = message(anthropic, stop_sequences=["never", " Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " Paris")
    assert stopped.content[0].text == ANSWER.partition(" Paris")[0]


def test_a_stream_of_messages(anthropic: Any) -> None:
    with anthropic.messages.stream(**GREEDY) as stream:
        assert len([*stream.text_stream]) > 3
        answer = stream.get_final_message()
    assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
    assert answer.usage.output_tokens > 3
    kinds = [event.type for event in message(anthropic, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert {*kinds[2:-3]} == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_calls_of_messages(anthropic: Any) -> None:
    """There and back."""
    tools = [{"name": "go", "description": "Go there.", "input_schema": SCHEMA}]
    given = {"tools": tools, "tool_choice": {"type": "tool", "name": "go"}, "max_tokens": 60}
    answer = message(anthropic, **given)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "go", "tool_use")
    assert call.input["city"] in ("Oslo", "Rome")
    with anthropic.messages.stream(**GREEDY | given) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "You are there."}
    said = [ASKED, {"role": "assistant", "content": answer.content}]
    said.append({"role": "user", "content": [result, {"type": "text", "text": QUESTION}]})
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert message(anthropic, messages=said, system=system).content[0].text


def test_errors_of_messages(anthropic: Any, smol: Served) -> None:
    module = pytest.importorskip("anthropic")
    body = {"messages": [ASKED], "max_tokens": 1, "output_config": {"format": {"type": "no"}}}
    said = smol.ask("/v1/messages", body)[2]["error"]["message"]
    assert said.startswith("output_config: type must be")
    with pytest.raises(module.BadRequestError, match="max_tokens"):
        message(anthropic, max_tokens=0)
    wrong = module.Anthropic(base_url=smol.url, api_key="wrong", max_retries=0)
    with pytest.raises(module.AuthenticationError):
        message(wrong)


# ---- ollama


@pytest.fixture(scope="module")
def ollama(smol: Served) -> Iterator[Any]:
    module = pytest.importorskip("ollama")
    with module.Client(host=smol.url, headers={"Authorization": f"Bearer {KEY}"}) as found:
        yield found


def ollama_chat(ollama: Any, **fields: Any) -> Any:
    given = {"model": "smol", "messages": [ASKED], "options": {"temperature": 0, "num_ctx": 4096}}
    return ollama.chat(**given | fields)


def test_ollama(ollama: Any, smol: Served) -> None:
    answer = ollama_chat(ollama)
    assert (answer.message.content, answer.done_reason) == (ANSWER, "stop")
    assert answer.prompt_eval_count > 20 and answer.eval_count > 3
    assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration > 0
    cut = ollama_chat(ollama, options={"temperature": 0, "num_predict": 2})
    assert (cut.message.content, cut.done_reason, cut.eval_count) == ("The capital", "length", 2)
    (model,) = ollama.list().models
    assert model.model == "smol" and smol.ask("/api/version")[2]["version"]


def test_a_stream_of_ollama(ollama: Any) -> None:
    *parts, end = ollama_chat(ollama, stream=True)
    assert len(parts) > 3 and not any(part.done for part in parts)
    assert "".join(part.message.content for part in parts) == ANSWER
    assert end.done and end.eval_count > 3 and end.message.content == ""


def test_forms_and_calls_of_ollama(ollama: Any) -> None:
    for format in (SCHEMA, "json"):
        told = json.loads(ollama_chat(ollama, format=format).message.content)
        assert told["city"] in ("Oslo", "Rome") if format is SCHEMA else isinstance(told, dict)
    call = {"function": {"name": "go", "arguments": {"city": "Oslo"}}}
    said = [ASKED, {"role": "assistant", "tool_calls": [call], "thinking": "Where?"}]
    said += [{"role": "tool", "tool_name": "go", "content": "You are there."}, ASKED]
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
    assert ollama_chat(ollama, messages=said, tools=[tool], think=False).message.content


def test_ollama_generates(ollama: Any, smol: Served) -> None:
    """Behind the chat template, or without it."""
    given = {"model": "smol", "options": {"temperature": 0, "num_predict": 20}}
    answer = ollama.generate(prompt=QUESTION, **given)
    assert (answer.response, answer.done_reason) == (ANSWER, "stop") and answer.eval_count > 3
    *parts, end = ollama.generate(prompt=QUESTION, stream=True, **given)
    assert "".join(part.response for part in parts) == ANSWER and len(parts) > 3
    assert end.done and end.response == "" and not any(part.done for part in parts)
    told = ollama.generate(prompt=QUESTION, system="Answer in JSON.", format=SCHEMA, **given)
    assert json.loads(told.response)["city"] in ("Oslo", "Rome")
    raw = [*ollama.generate(prompt="One, two,", raw=True, stream=True, **given)]
    body = {"prompt": "One, two,", "temperature": 0, "max_tokens": 20}
    text = smol.ask("/v1/completions", body)[2]["choices"][0]["text"]
    assert "".join(part.response for part in raw) == text and raw[-1].eval_count == 20
    assert ollama.generate(prompt="One, two,", raw=True, **given).response == text


def test_fields_of_ollama_that_change_nothing(ollama: Any, smol: Served) -> None:
    """Hints, and values that say what is so without them."""
    hints = {"num_ctx": 64, "num_gpu": 1, "use_mmap": False, "mirostat_tau": 5.0, "num_thread": 2}
    same = {"mirostat": 0.0, "repeat_last_n": 64, "typical_p": 1.0, "tfs_z": 1, "top_k": 0}
    options = {"temperature": 0, "penalize_newline": True, "seed": -1} | hints | same
    assert ollama_chat(ollama, options=options, keep_alive="5m").message.content == ANSWER
    body = {"messages": [ASKED], "options": {"temperature": 0}, "stream": False}
    for fields in ({"truncate": True, "shift": False}, {"logprobs": False, "top_logprobs": 0}):
        status, _, told = smol.ask("/api/chat", body | fields)
        assert status == 200 and told["message"]["content"] == ANSWER


def test_log_probabilities_of_ollama(ollama: Any, smol: Served) -> None:
    """In the words of OpenAI's, beside the text of each piece."""
    scored = {"messages": [ASKED], "logprobs": True, "top_logprobs": 2}
    body = scored | {"options": {"temperature": 0}, "stream": False}
    status, _, told = smol.ask("/api/chat", body)
    assert status == 200 and told["message"]["content"] == ANSWER
    theirs = smol.ask("/v1/chat/completions", scored | {"temperature": 0})[2]["choices"][0]
    assert told["logprobs"] == theirs["logprobs"]["content"] and told["logprobs"]
    assert {len(one["top_logprobs"]) for one in told["logprobs"]} == {2}
    given = {"model": "smol", "options": {"temperature": 0}, "logprobs": True}
    parts = ollama.generate(prompt=QUESTION, stream=True, **given)
    assert "".join(one.token for part in parts for one in part.logprobs or ()) == ANSWER


def test_ollama_loads(ollama: Any) -> None:
    """A request without a text is one for the model in memory."""
    for told in (ollama.generate(model="smol"), ollama.chat(model="smol", messages=[])):
        assert told.done and told.done_reason == "load" and told.eval_count is None
    [part] = ollama.generate(model="smol", stream=True)
    assert part.response == "" and part.done


def test_ollama_shows(ollama: Any) -> None:
    shown = ollama.show("smol")
    assert shown.capabilities == ["completion"] and "im_start" in shown.template
    assert shown.modelinfo == {"general.architecture": "llama", "llama.context_length": 8192}


# ---- langchain


def test_langchain(smol: Served) -> None:
    langchain = pytest.importorskip("langchain_openai")

    def chat(**options: Any) -> Any:
        given = {"base_url": f"{smol.url}/v1", "api_key": KEY, "model": "smol", "temperature": 0}
        return langchain.ChatOpenAI(**given | options)

    answer = chat().invoke(QUESTION)
    assert answer.content == ANSWER and answer.usage_metadata["output_tokens"] > 3
    assert "".join(part.content for part in chat().stream(QUESTION)) == ANSWER
    assert chat(use_responses_api=True).invoke(QUESTION).text == ANSWER
    scored = chat().bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = scored.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in tokens) == ANSWER
    assert all(len(one["top_logprobs"]) == 2 for one in tokens)
    schema = {"title": "place", "description": "A place."} | SCHEMA
    for method in ("json_schema", "function_calling"):
        found = chat().with_structured_output(schema, method=method).invoke(QUESTION)
        assert found["city"] in ("Oslo", "Rome")
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
    (call,) = chat().bind_tools([tool], tool_choice="go").invoke(QUESTION).tool_calls
    assert call["name"] == "go" and call["args"]["city"] in ("Oslo", "Rome")

"""What `metalmm serve` refuses, and in which shape."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from serving import KEY, Served

from torch_metalmm.tools.cli import main

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# A body that is answered, but for the limits of the tiny model's server: two messages, 2000 bytes.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/embeddings": {"input": "ab"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER], "max_tokens": 1},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
}
COMPLETIONS: tuple[tuple[str, Any], ...] = (
    ("temperature", 3),
    ("temperature", "warm"),
    ("temperature", 10**400),
    ("top_p", 1.5),
    ("repetition_penalty", 1e-40),
    ("max_tokens", 0),
    ("max_tokens", -2),
    ("seed", 1 << 63),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("n", 17),
    ("n", 0),
    ("n", 10**30),
    ("best_of", 2),
    ("logprobs", 10**30),
    ("logit_bias", {"320": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"1e1": 5}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": [1]}),
    ("logit_bias", [[1, 5]]),
    ("frequency_penalty", -2.1),
    ("suffix", "b"),
    ("prompt", ["a"] * 17),
    ("prompt", [320]),
    ("prompt", "a" * 500),
    ("regex", "("),
    ("grammar", "start: nothing"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}),
    ("no_such_field", 1),
)
EMBEDDINGS: tuple[Any, ...] = ("", [], ["a", ""], [1 << 20], [3] * 600, {"a": 1})
# What is wrong in a chat; several fields where the one that is named is wrong beside the others.
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [USER, USER, USER]},
    {"messages": []},
    {"messages": [{"role": "robot", "content": "Hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    {"top_logprobs": 21, "logprobs": True},
    {"top_logprobs": 1},
    {"modalities": ["text", "audio"]},
    {"reasoning_effort": "utmost"},
    {"chat_template_kwargs": {"chat_template": "{{ 9 ** 9 }}"}},
    {"chat_template_kwargs": {"messages": []}},
    {"tools": [{"type": "function"}]},
    {"tools": [{"function": {"name": 'a"b'}}]},
    {"tools": [{"function": {"name": "a", "parameters": [1]}}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": ["a"]}}},
    {"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]},
    {"regex": "a", "tools": [TOOL]},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"regex": "a", "response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"const": 2**53 + 1}},
        },
    },
)
RESPONSES: tuple[tuple[str, Any], ...] = (
    ("previous_response_id", "resp_1"),
    ("background", True),
    ("truncation", "auto"),
    ("input", [{"type": "image_generation_call"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ("input", [[["a"]]]),
    ("input", []),
    ("input", [{}] * 3),
    ("text", {"format": [1]}),
    ("text", {"verbosity": "low"}),
    ("text", {"format": {"type": "json_schema"}}),
    ("reasoning", {"effort": "deep"}),
    ("reasoning", {"effort": {}}),
    ("max_output_tokens", 0),
    ("tools", {"a": 1}),
    ("tools", [{"type": "function", "name": "f"}] * 3),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("tool_choice", [[]]),
)
MESSAGES: tuple[tuple[str, Any], ...] = (
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    ("messages", [{"role": "user", "content": [["a"]]}]),
    ("messages", [{"role": "user"}]),
    ("messages", [1]),
    ("messages", [{"role": {}, "content": "a"}]),
    ("system", [{"type": "image"}]),
    ("tool_choice", {"type": []}),
    ("tool_choice", {"type": "tool", "name": "f"}),
    ("output_config", {"task_budget": 1}),
    ("output_config", {"effort": []}),
    ("output_config", {"effort": "deep"}),
    ("mcp_servers", [{}]),
    ("stop_sequences", [["a"]]),
)
# Fields, and what is said of them.
OLLAMA_CHATS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"options": {"mirostat": 1}}, "options: mirostat is not known"),
    ({"options": {"typical_p": 0.5}}, "options: typical_p is not known"),
    ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options: repeat_last_n is not"),
    ({"options": {"temperature": 3}}, "options: temperature: 3.0; must be"),
    ({"options": {"temperature": []}}, "options: temperature: "),
    ({"options": {"top_k": -1}}, "options: top_k: "),
    ({"format": "xml"}, "format: must be 'json'"),
    ({"top_logprobs": 2}, "top_logprobs: only with logprobs"),
    ({"messages": [USER | {"images": ["aaaa"]}]}, "messages: no images: the model sees none"),
    ({"messages": [USER | {"images": {}}]}, "messages: images must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages: "),
    ({"messages": 1}, "messages: "),
    ({"messages": ""}, "messages: "),
    ({"think": "deeply"}, "think: "),
)
OLLAMA_TEXTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"template": "a"}, "template: not supported"),
    ({"context": [3]}, "context: not supported"),
    ({"raw": True, "system": "a"}, "system: not with raw or suffix"),
    ({"suffix": "b"}, "suffix: the model fills no gaps"),
    ({"suffix": "b", "think": True}, "think: not with raw or suffix"),
    ({"raw": True, "options": {"num_predict": 0}}, "options: num_predict: 0; must be"),
    ({"raw": True, "logprobs": True}, "logprobs: not with raw or suffix"),
    ({"raw": True, "format": {"type": "no"}}, "format: "),
)
CASES = [
    *(("/v1/completions", {name: value}, name) for name, value in COMPLETIONS),
    *(("/v1/embeddings", {"input": value}, "input: ") for value in EMBEDDINGS),
    *(("/v1/chat/completions", fields, next(iter(fields))) for fields in CHATS),
    *(("/v1/responses", {name: value}, name) for name, value in RESPONSES),
    *(
        (f"/v1/messages{path}", {name: value}, f"{name}: ")
        for name, value in MESSAGES
        for path in ("", "/count_tokens")
    ),
    *(("/api/chat", fields, said) for fields, said in OLLAMA_CHATS),
    *(("/api/generate", fields, said) for fields, said in OLLAMA_TEXTS),
]


@pytest.mark.parametrize(("path", "fields", "said"), CASES, ids=lambda value: str(value)[:30])
def test_a_field_is_named(tiny: Served, path: str, fields: dict[str, Any], said: str) -> None:
    """As the client wrote it, in the shape of its API."""
    status, _, told = tiny.ask(path, BODIES[path] | fields)
    error = told["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert status == 400 and message.startswith(said), told
    if path.startswith("/api/"):
        assert told.keys() == {"error"}
        return
    assert error["type"] == "invalid_request_error"
    if path.startswith("/v1/messages"):
        assert told["type"] == "error"
    else:
        named = {"message", "type", "param", "code"}
        assert error["param"] in fields and error.keys() == named


def test_a_model_without_a_chat_template(tiny: Served) -> None:
    status, _, told = tiny.ask("/v1/chat/completions", {"messages": [USER]})
    assert status == 400 and "no chat template" in told["error"]["message"]


def test_routes(tiny: Served) -> None:
    """Those that are not there, and a method that is not."""
    assert tiny.url.startswith("http://127.0.0.2:")
    assert tiny.ask("/v1/nothing")[0] == 404
    for path in ("/api/pull", "/api/create"):
        status, _, told = tiny.ask(path, {})
        assert status == 404 and isinstance(told["error"], str)
    status, headers, told = tiny.ask("/v1/completions")
    assert (status, headers["allow"]) == (405, "POST") and "error" in told


def test_a_body_without_a_length(tiny: Served) -> None:
    """It is counted as it comes, and not read to its end."""
    connection = http.client.HTTPConnection(tiny.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    parts = iter([b" " * 1500] * 2)
    connection.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def asked_until(tiny: Served, status: int) -> Any:
    """What /health tells with this status, which comes when the server has read what came."""
    for _ in range(100):
        found, headers, told = tiny.ask("/health")
        if found == status:
            return headers, told
        time.sleep(0.05)
    raise AssertionError(f"status {found}, not {status}")


def test_too_many_requests_at_a_time(tiny: Served) -> None:
    """Those whose bodies are still to come are counted, too; it ends with them."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    head += f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    host, port = tiny.url.removeprefix("http://").split(":")
    with ExitStack() as opened:
        for _ in range(4 + 16 + 64 - 1):
            one = opened.enter_context(socket.create_connection((host, int(port))))
            one.sendall(head.encode())
        asked_until(tiny, 200)
        one = opened.enter_context(socket.create_connection((host, int(port))))
        one.sendall(head.encode())
        headers, told = asked_until(tiny, 503)
        assert told["error"]["code"] == "requests" and headers["retry-after"] == "1"
        assert isinstance(tiny.ask("/api/chat", {})[2]["error"], str)  # in Ollama's shape
    asked_until(tiny, 200)


ODD = (
    '{"\\ud800": 1}',
    '{"input": ["\\uD800"]}',
    '{"x": NaN}',
    '{"x": [-Infinity]}',
    '{"x": 1e999}',
)


@pytest.mark.parametrize("body", ODD)
@pytest.mark.parametrize("path", ("completions", "chat/completions", "responses", "messages"))
def test_what_is_no_json_of_unicode(tiny: Served, path: str, body: str) -> None:
    """An answer that quotes it could not be sent."""
    status, _, told = tiny.ask(f"/v1/{path}", body.encode())
    assert status == 400 and told["error"]["message"].startswith("the body is not JSON: ")
    assert told["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("flags", "told"),
    (
        (("--host", "0.0.0.0"), "others can reach it; give --api-key"),
        (("--api-key", ""), "--api-key: must be"),
        (("--api-key", "one", "--api-key", "t wo"), "--api-key: must be"),
        (("--origin", "*"), "--origin *: must be"),
        (("--origin", "https://a.example/path"), "--origin https://a.example/path: must be"),
        (("--pooling", "max"), "--pooling max: must be"),
        (("--cache", "q9"), "--cache: "),
        (("--model", "other.gguf"), "the model is"),
    ),
)
def test_flags(
    flags: tuple[str, ...],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("METALMM_API_KEY", raising=False)
    assert main(["serve", str(tmp_path / "none.gguf"), *flags]) == 1
    assert told in capsys.readouterr().err

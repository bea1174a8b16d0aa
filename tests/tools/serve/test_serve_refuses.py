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


def ask(tiny: Served, path: str = "completions", **fields: Any) -> tuple[int, Any]:
    text = {"prompt": "ab", "max_tokens": 2} if path == "completions" else {}
    status, _, told = tiny.ask(f"/v1/{path}", {"model": "tiny"} | text | fields)
    return status, told


def test_it_answers(tiny: Served) -> None:
    assert tiny.url.startswith("http://127.0.0.2:")
    status, told = ask(tiny, seed=3)
    assert status == 200 and told["usage"]["completion_tokens"] == 2
    assert ask(tiny, seed=3)[1]["choices"] == told["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    (
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
        ("logprobs", 21),
        ("logprobs", 10**30),
        ("logit_bias", {"320": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"1e1": 5}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": [1]}),
        ("logit_bias", [[1, 5]]),
        ("frequency_penalty", -2.1),
        ("suffix", "b"),
        ("stop", [["a"]]),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", [[[1]]]),
        ("prompt", ["a", [1]]),
        ("prompt", ["a"] * 17),
        ("prompt", [320]),
        ("prompt", "a" * 500),
        ("regex", "("),
        ("grammar", "start: nothing"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}),
        ("no_such_field", 1),
    ),
    ids=lambda value: str(value)[:30],
)
def test_a_field_is_named(tiny: Served, field: str, value: Any) -> None:
    status, told = ask(tiny, **{field: value})
    error = told["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert error["message"].startswith(field) and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "fields",
    (
        {"messages": [USER, USER, USER]},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [USER], "logprobs": True, "top_logprobs": 21},
        {"messages": [USER], "top_logprobs": 1},
        {"messages": [USER], "modalities": ["text", "audio"]},
        {"messages": [USER], "reasoning_effort": "utmost"},
        {"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 9 ** 9 }}"}},
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        {"messages": [USER], "tools": [{"type": "function"}]},
        {"messages": [USER], "tools": [{"function": {"name": 'a"b'}}]},
        {"messages": [USER], "tools": [{"function": {"name": "a", "parameters": [1]}}]},
        {"messages": [USER], "tool_choice": "required"},
        {"messages": [USER], "tool_choice": {"type": "function", "function": {"name": ["a"]}}},
        {"messages": [USER], "tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]},
        {"messages": [USER], "regex": "a", "tools": [TOOL]},
        {"messages": [USER], "response_format": {"type": "xml"}},
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {}}},
        {"messages": [USER], "response_format": {"type": "json_object"}, "regex": "a"},
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"const": 2**53 + 1}},
            },
        },
    ),
)
def test_a_chat_is_refused(tiny: Served, fields: dict[str, Any]) -> None:
    status, told = ask(tiny, "chat/completions", **fields)
    assert status == 400 and told["error"]["param"] in fields


def test_a_model_without_a_chat_template(tiny: Served) -> None:
    status, told = ask(tiny, "chat/completions", messages=[USER])
    assert status == 400 and "no chat template" in told["error"]["message"]


def test_routes(tiny: Served) -> None:
    """Those that are not there, and a method that is not."""
    assert tiny.ask("/v1/nothing")[0] == 404
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

"""What is no HTTP, in a body and after a response: refused once, no error of the server."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from serving import listening

pytest.importorskip("uvicorn")

from starlette.requests import ClientDisconnect, Request

from torch_metalmm.tools.serve.errors import ApiError
from torch_metalmm.tools.serve.wire import Protocol, refused

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_CHUNK = b"zzz\r\n"


async def early(scope: Any, receive: Any, send: Any) -> None:
    """Refuses without reading the body."""
    await refused("/", ApiError(415, "early"))(scope, receive, send)


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """Refuses the body, or the client that is gone."""
    try:
        await Request(scope, receive).body()
    except ClientDisconnect:
        await refused("/", ApiError(500, "gone"))(scope, receive, send)
        return
    await refused("/", ApiError(415, "read"))(scope, receive, send)


async def told(app: Any, *sent: bytes) -> tuple[bytes, list[dict[str, Any]]]:
    """(what a client gets that sends these, each after the last's answer; the loop's errors)."""
    loop, errors = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with listening(app, Protocol) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = b""
        for i, part in enumerate(sent):
            if i:
                found += await reader.readuntil(b"}}")
            writer.write(part)
        found += await reader.read()
        writer.close()
        await asyncio.gather(*state.tasks, return_exceptions=True)
    return found, errors


@pytest.mark.parametrize(
    ("app", "sent", "status"),
    (
        (early, (HEAD + NO_CHUNK,), 400),
        (early, (HEAD, NO_CHUNK), 415),
        (reading, (HEAD + NO_CHUNK,), 400),
        (reading, (b"zzz\r\n\r\n",), 400),
    ),
)
def test_a_client_that_breaks_off_http(
    app: Any, sent: tuple[bytes, ...], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found, errors = asyncio.run(told(app, *sent))
    assert found.startswith(b"HTTP/1.1 %d " % status) and found.count(b"HTTP/1.1 ") == 1
    body = found[found.index(b"{") : found.rindex(b"}") + 1]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert errors == [] and {r.levelname for r in caplog.records} == {"WARNING"}

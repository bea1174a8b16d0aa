"""Clients that say half of a request or no HTTP, or read nothing: real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from serving import DESCRIPTORS, Served, descriptors, listening

pytest.importorskip("uvicorn")

from starlette.requests import ClientDisconnect, Request

from torch_metalmm.tools.serve import wire
from torch_metalmm.tools.serve.errors import ApiError

HALF = b"GET /0 HTTP/1.1\r\nHost: local"
WHOLE = b"GET /0 HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answers(scope: Any, receive: Any, send: Any) -> None:
    """As many MiB as the path says."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(scope["path"].strip("/") or 0)):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b"ok"})


async def closed_after(port: int, *sent: bytes) -> tuple[bytes, float]:
    """(what comes, the seconds until the server closes) of a client that sends these parts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    begun, came = time.monotonic(), b""
    for part in sent:
        writer.write(part)
        await asyncio.sleep(0.1)
    with suppress(ConnectionError):
        came = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return came, time.monotonic() - begun


@pytest.mark.parametrize(
    "sent",
    ((), (HALF,), (WHOLE,), (WHOLE, HALF), tuple(HALF[i : i + 1] for i in range(20))),
    ids=("nothing", "half", "idle after", "half after", "drops"),
)
def test_a_request_that_does_not_come(
    sent: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends in time, however slowly its head comes; what was asked is answered."""
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.5)

    async def ask() -> tuple[bytes, float]:
        async with listening(answers, wire.protocol(8)) as (port, _):
            return await closed_after(port, *sent)

    came, seconds = asyncio.run(ask())
    assert came.count(b"ok") == (WHOLE in sent) and seconds < 3


def test_an_answer_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and frees what it has; one that is read slowly is whole."""
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(wire, "WRITE_SECONDS", 0.5)
    get = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def ask() -> tuple[int, int]:
        async with listening(answers, wire.protocol(8)) as (port, state):
            _, unread = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
            unread.write(get % 64)
            reader, slow = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            slow.write(get % 8)
            count = 0
            while len(part := await asyncio.wait_for(reader.read(1 << 16), 10)):
                count += len(part)
                await asyncio.sleep(0.01)
            for _ in range(50):
                if not state.connections and not state.tasks:
                    break
                await asyncio.sleep(0.1)
            left = len(state.connections) + len(state.tasks)
            unread.close()
            slow.close()
            return count, left

    count, left = asyncio.run(ask())
    assert count > 8 << 20 and left == 0


def test_too_many_connections() -> None:
    """One that waits for its request makes room; where all are answered, a new one is refused."""

    async def ask() -> list[bytes]:
        async with listening(answers, wire.protocol(2)) as (port, _):
            halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in halves:
                writer.write(HALF)
            busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in busy:
                writer.write(b"GET /64 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            found = [await asyncio.wait_for(reader.read(), 10) for reader, _ in halves]
            await asyncio.sleep(0.2)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(WHOLE)
            found.append(await asyncio.wait_for(reader.read(), 10))
            for _, opened in (*halves, *busy, (reader, writer)):
                opened.close()
            return found

    *halves, refused = asyncio.run(ask())
    assert halves == [b"", b""]
    assert refused.startswith(b"HTTP/1.1 503 ")
    error = json.loads(refused[refused.index(b"{") :])["error"]
    assert error["code"] == "connections"


def test_more_half_requests_than_descriptors(tiny: Served) -> None:
    """Clients that send half of a head do not keep others out."""
    with ExitStack() as opened:
        opened.enter_context(descriptors(2 * DESCRIPTORS))
        host, port = tiny.url.removeprefix("http://").split(":")
        for _ in range(DESCRIPTORS + 100):
            one = opened.enter_context(socket.create_connection((host, int(port)), 30))
            one.sendall(HALF)
        begun = time.monotonic()
        for _ in range(3):
            assert tiny.ask("/health")[0] == 200
        assert time.monotonic() - begun < 10


# ---- what is no HTTP, in a body and after a response

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
NO_CHUNK = b"zzz\r\n"


async def early(scope: Any, receive: Any, send: Any) -> None:
    """Refuses without reading the body."""
    await wire.refused("/", ApiError(415, "early"))(scope, receive, send)


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """Refuses the body, or the client that is gone."""
    try:
        await Request(scope, receive).body()
    except ClientDisconnect:
        await wire.refused("/", ApiError(500, "gone"))(scope, receive, send)
        return
    await wire.refused("/", ApiError(415, "read"))(scope, receive, send)


async def told(app: Any, *sent: bytes) -> tuple[bytes, list[dict[str, Any]]]:
    """(what a client gets that sends these, each after the last's answer; the loop's errors)."""
    loop, errors = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with listening(app, wire.Protocol) as (port, state):
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

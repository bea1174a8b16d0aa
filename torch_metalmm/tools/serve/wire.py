"""Limits of a client's connection, and refusals in the shape of a path's API.

uvicorn refuses with a text, waits for ever for a request's head and for a client that reads
nothing, and counts no connections: those that say half of a request would take all descriptors.
"""

from __future__ import annotations

import asyncio
import json
import resource

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import messages, ollama
from .errors import ApiError

# By the beginning of a path: the body of an error; else OpenAI's.
_SHAPES = {"/v1/messages": messages.refusal, "/api/": ollama.refusal}


def refused(path: str, error: ApiError) -> JSONResponse:
    """In the shape of the API that has the path."""
    shape = next((s for begins, s in _SHAPES.items() if path.startswith(begins)), ApiError.body)
    return JSONResponse(shape(error), error.status, error.headers)


class Bounded:
    """An app for so many requests at a time, from their headers to the end of their answers.

    uvicorn's limit_concurrency would count connections without a request, too.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most, self._count = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._count >= self._most:
            message = f"{self._most} requests are open already"
            error = ApiError(503, message, code="requests", retry_after=1)
            await refused(scope["path"], error)(scope, receive, send)
            return
        self._count += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1


HEAD_SECONDS = 10.0  # for a request's head, from the connection's begin or the last answer
WRITE_SECONDS = 60.0  # in which a client must read something of what waits for it
BACKLOG = 64  # connections that the system accepts before they are seen here, all in one turn
_SPARE = 64  # connections beside the requests that may be open
_OTHERS = 128  # descriptors that are none of connections


def connections_of(requests: int) -> int:
    """How many connections a server of so many requests has, given the descriptors it may have."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return requests + _SPARE
    return max(1, min(requests + _SPARE, descriptors - _OTHERS))


def protocol(connections: int) -> type[Protocol]:
    """The protocol of a server of so many connections."""
    return type("Protocol", (Protocol,), {"most": connections})


class Protocol(H11Protocol):  # type: ignore[misc]
    """HTTP that h11 reads; without it uvicorn takes httptools where that is installed."""

    most = 1  # connections
    _timer: asyncio.TimerHandle | None = None  # which ends the connection
    _is_waiting = True  # for a request
    _since = 0.0  # when it began to wait

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) <= self.most:
            self._limit(HEAD_SECONDS)
            return
        waiting = [c for c in self.connections if c._is_waiting and c is not self]
        if waiting:
            oldest = min(waiting, key=lambda c: c._since)
            self.connections.discard(oldest)  # before the loop tells it so
            oldest.transport.abort()
            self._limit(HEAD_SECONDS)
            return
        message = f"{self.most} connections are open already"
        self._refuse(ApiError(503, message, code="connections", retry_after=1))
        self._limit(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.cycle is not None and not self.cycle.response_complete:
            self._is_waiting = False
            self._limit(None)

    def on_response_complete(self) -> None:
        self._is_waiting, self._since = True, self.loop.time()
        self._limit(HEAD_SECONDS)  # also where it closes: what is not read would keep it open
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit(WRITE_SECONDS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit(HEAD_SECONDS if self._is_waiting else None)

    def _limit(self, seconds: float | None) -> None:
        """End the connection after so many seconds, None: not."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app's own response would be a second one
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # bytes that are no HTTP came after a response, or beside one
            return
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer whatever comes with the error, and close."""
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=b""),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

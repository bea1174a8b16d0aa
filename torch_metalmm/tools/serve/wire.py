"""Refusals in the shape of OpenAI's API, also of what uvicorn would refuse itself with a text."""

from __future__ import annotations

import json

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError


def refused(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


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
            await refused(error)(scope, receive, send)
            return
        self._count += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1


class Protocol(H11Protocol):  # type: ignore[misc]
    """HTTP that h11 reads; without it uvicorn takes httptools where that is installed."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the app's own response would be a second one
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # what is no HTTP came after a response, or beside one
            return
        body = json.dumps(ApiError(400, msg).body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

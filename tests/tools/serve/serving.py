"""Requests to a `metalmm serve` of tests."""

from __future__ import annotations

import asyncio
import json
import resource
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from bench.models.served import Server, server

KEY, OTHER_KEY = "a-key-of-tests", "another"
# Of the server of a tiny model.
ORIGIN = "https://chat.example:8080"
CONTEXT, DESCRIPTORS = 256, 256


class Served(Server):
    def ask(
        self, path: str, body: Any = None, key: str = KEY, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """(status, headers, JSON or text) of a request; a body, JSON or bytes, makes it a POST."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        for name, value in headers.items():
            given[name.replace("_", "-")] = value
        request = urllib.request.Request(self.url + path, data, given)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, dict(answer.headers), _told(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), _told(error.read())


def _told(text: bytes) -> Any:
    return json.loads(text) if text.startswith(b"{") else text.decode()


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """A server of these flags, which ends at the end. RuntimeError: it did not start."""
    with server(*flags, METALMM_API_KEY=f"{KEY}\n{OTHER_KEY}\n", HF_HUB_OFFLINE="1") as found:
        yield Served(*found)


@asynccontextmanager
async def listening(app: Any, protocol: Any) -> AsyncIterator[tuple[int, Any]]:
    """A port of this process where uvicorn's server of that protocol calls the app, its state."""
    import uvicorn
    from uvicorn.server import ServerState

    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=60)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1], state
        for connection in list(state.connections):
            connection.transport.abort()


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """This process, and those that it starts, may have so many files open, or all that it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if before[1] < 0 else min(count, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

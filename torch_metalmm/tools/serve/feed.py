"""What comes from the engine's thread, for a request that is answered on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import anyio

from .engine import Engine, Finish, Job, Task
from .errors import ApiError

_Found = TypeVar("_Found")


class Feed:
    """The pieces of one request, up to a deadline. close() frees its place in the engine."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        """With a place in the queue, for a request that is still to be prepared.

        ApiError 429, 503: as Engine.reserve.
        """
        self._engine, self._seconds = engine, seconds
        self._end = time.monotonic() + seconds
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self._request: Job | Task | None = None
        self._is_closed = False
        engine.reserve()
        self._is_reserved = True

    def tell(self, what: Any) -> None:
        """From the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._came.put_nowait, what)
        except RuntimeError:  # the loop is closed: the server ended
            return

    def is_closed(self) -> bool:
        """From any thread."""
        return self._is_closed

    def submit(self, request: Job | Task) -> None:
        """ApiError 503: as Engine.submit."""
        self._engine.submit(request)
        self._request, self._is_reserved = request, False

    async def within(self, work: Awaitable[_Found]) -> _Found:
        """What the work gives. ApiError 504: the deadline comes first."""
        try:
            with anyio.fail_after(max(0.0, self._end - time.monotonic())):
                return await work
        except TimeoutError:
            message = f"the answer took more than {self._seconds:g} s"
            raise ApiError(504, message, code="timeout") from None

    async def result(self) -> Any:
        """The next thing that comes. ApiError: it is an error, or takes too long."""
        came = await self.within(self._came.get())
        if isinstance(came, ApiError):
            raise came
        if isinstance(came, Exception):
            said = " ".join(str(came).split()) or type(came).__name__
            raise ApiError(500, f"the model failed: {said}")
        return came

    async def pieces(self) -> AsyncIterator[str | Finish]:
        """Texts, then the Finish. ApiError: as result()."""
        while True:
            came = await self.result()
            yield came
            if isinstance(came, Finish):
                return

    def close(self) -> None:
        self._is_closed = True
        if self._is_reserved:
            self._engine.release()
            self._is_reserved = False
        if self._request is not None:
            self._engine.cancel(self._request)
            self._request = None

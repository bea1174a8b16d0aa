"""Results of the engine's thread, for a request that is answered on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import anyio

from ..writing import Finish
from .engine import Engine, Job, Task
from .errors import ApiError
from .weights import Scored

_Found = TypeVar("_Found")


class Feed:
    """The results of one request, up to a deadline. close() frees its places in the engine."""

    def __init__(self, engine: Engine, seconds: float, count: int = 1) -> None:
        """With `count` places in the queue, for jobs or a task that are still to be prepared.

        ApiError 429, 503: as Engine.reserve.
        """
        self._engine, self._seconds = engine, seconds
        self._end = time.monotonic() + seconds
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._requests: list[Job | Task] = []
        self._reserved = 0
        self._is_closed = False
        try:
            for _ in range(count):
                engine.reserve()
                self._reserved += 1
        except ApiError:
            self.close()
            raise

    def tell(self, what: Any, index: int = 0) -> None:
        """From the engine's thread. index: of the request's jobs."""
        try:
            self._loop.call_soon_threadsafe(self._came.put_nowait, (index, what))
        except RuntimeError:  # the loop is closed: the server ended
            return

    def is_closed(self) -> bool:
        """From any thread."""
        return self._is_closed

    def submit(self, requests: list[Job] | list[Task]) -> None:
        """ApiError 503: as Engine.submit."""
        for request in requests:
            self._engine.submit(request)
            self._requests.append(request)
            self._reserved -= 1

    async def within(self, work: Awaitable[_Found]) -> _Found:
        """The result of the work. ApiError 504: the deadline comes first."""
        try:
            with anyio.fail_after(max(0.0, self._end - time.monotonic())):
                return await work
        except TimeoutError:
            message = f"the answer took more than {self._seconds:g} s"
            raise ApiError(504, message, code="timeout") from None

    async def result(self) -> tuple[int, Any]:
        """(of which job, the next thing that comes). ApiError: an error, or it takes too long."""
        index, came = await self.within(self._came.get())
        if isinstance(came, ApiError):
            raise came
        if isinstance(came, Exception):
            said = " ".join(str(came).split()) or type(came).__name__
            raise ApiError(500, f"the model failed: {said}")
        return index, came

    async def pieces(self) -> AsyncIterator[tuple[int, str | Scored | Finish]]:
        """The pieces of each job, its Finish last. ApiError: as result()."""
        left = len(self._requests)
        while left:
            index, came = await self.result()
            yield index, came
            left -= isinstance(came, Finish)

    def close(self) -> None:
        self._is_closed = True
        for _ in range(self._reserved):
            self._engine.release()
        for request in self._requests:
            self._engine.cancel(request)
        self._reserved, self._requests = 0, []

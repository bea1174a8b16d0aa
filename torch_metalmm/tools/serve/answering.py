"""A request's way through the engine: its jobs, and what comes of them as a response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..writing import Finish
from .calling import Wanted
from .engine import Engine, Job, Prompt
from .errors import ApiError, unsupported, wrong
from .feed import Feed
from .metrics import Metrics
from .prompts import Prompts
from .replies import Reply
from .schema import Asked, Chat, Completion, Generation
from .weights import Scores

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Answering:
    """The parts that answers need. Each answer of a request has a place of the engine's queue."""

    name: str  # the model's name
    engine: Engine
    prompts: Prompts
    seconds: float  # limit of a request, the time it waits included
    has_scores: bool  # whether a token's logits are known when it comes
    metrics: Metrics

    async def answer(self, request: Request, asked: Asked, given: Chat | Completion) -> Response:
        """The response to what is asked, made into what is given. ApiError: it has none."""
        per_prompt, count = given.n or 1, given.count()
        if (most := self.engine.queue) < per_prompt * count:
            name = "prompt" if count > 1 else "n"
            raise wrong(name, f"{per_prompt * count} answers; at most {most} of one request")
        if given.scored() is not None and not self.has_scores:
            raise unsupported("logprobs", "not of a model whose answers are computed one at a time")
        begun = time.monotonic()
        feed = Feed(self.engine, self.seconds, per_prompt * count)

        def made() -> tuple[list[Prompt], list[Job]]:
            wanted = given.form()  # a schema may have megabytes
            prompts = self.prompts.of(given)
            return prompts, list(self._jobs(given, wanted, prompts, feed, request.state.owner))

        try:
            prompts, jobs = await unless_gone(request, feed.within(asyncio.to_thread(made)))
            feed.submit(jobs)
            choices = given.choices(prompts, self.prompts.spelled)
            reply = asked.reply(self.name, given, prompts, choices)
            if given.stream:
                events = self._events(feed, reply, begun, asked.names)
                return _Events(events, feed, reply.media_type)
            answer = await unless_gone(request, self._whole(feed, reply, begun))
        except BaseException:
            feed.close()
            raise
        feed.close()
        return JSONResponse(answer)

    def _jobs(
        self,
        given: Generation,
        wanted: Wanted | None,
        prompts: list[Prompt],
        feed: Feed,
        owner: bytes,
    ) -> Iterator[Job]:
        scored = given.scored()
        for i in range(len(prompts) * (given.n or 1)):
            prompt = prompts[i // (given.n or 1)]
            tell = partial(feed.tell, index=i)
            options = given.options(prompt.room)
            options.form = self.prompts.form(wanted, prompt.text, prompt.ids)
            options.bias = self.prompts.bias(given, len(prompt.ids))
            options.scores = None if scored is None else Scores(scored, tell)
            seed = None if given.seed is None else (given.seed + i) % (1 << 64)
            yield Job(prompt.text, prompt.ids, options, seed, tell, owner, prompt.inputs)

    async def _pieces(self, feed: Feed, begun: float) -> AsyncIterator[tuple[int, Any]]:
        is_first = True
        async for index, came in feed.pieces():
            if is_first:
                self.metrics.began(time.monotonic() - begun)
                is_first = False
            if isinstance(came, Finish):
                self.metrics.ended(came)
            yield index, came

    async def _events(
        self, feed: Feed, reply: Reply, begun: float, names: Mapping[str, str]
    ) -> AsyncIterator[str]:
        for event in reply.first():
            yield event
        try:
            async for index, came in self._pieces(feed, begun):
                for event in reply.feed(index, came):
                    yield event
        except ApiError as error:
            yield reply.failed(error.named(names))
            return
        for event in reply.last():
            yield event

    async def _whole(self, feed: Feed, reply: Reply, begun: float) -> dict[str, Any]:
        async for index, came in self._pieces(feed, begun):
            for _ in reply.feed(index, came):
                pass
        return reply.whole()


class _Events:
    """The pieces of an answer; when they end, however that is, so does the computing."""

    status_code = 200

    def __init__(self, events: AsyncIterator[str], feed: Feed, kind: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response = StreamingResponse(events, media_type=kind, headers=headers)
        self._feed = feed

    async def __call__(self, *given: Any) -> None:
        try:
            await self._response(*given)
        finally:
            self._feed.close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Found]) -> _Found:
    """The result of the work. ClientDisconnect: the client goes before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()

"""The routes, who may use them, and how much a request may take."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .embedding import Embedder
from .engine import Engine, Finish, Job, Task
from .errors import ApiError
from .feed import Feed
from .prompts import Prompts
from .replies import ChatReply, CompletionReply
from .schema import Chat, Completion, Embedding, Generation, parse
from .tokens import LARGE, give_memory_back
from .wire import Bounded, refused

_BODY_SECONDS = 30.0  # to send a body
_DEFAULT_NEW = 16  # of completions: OpenAI's
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Limits:
    body: int  # bytes
    messages: int  # of a chat, and texts of one request for embeddings
    seconds: float  # of a request, the time it waits included
    requests: int  # at a time, those that are still read included


@dataclass(frozen=True)
class Server:
    """What the routes need."""

    name: str  # of the model
    engine: Engine
    prompts: Prompts | None  # None: the model generates no text
    embedder: Embedder
    limits: Limits
    owners: dict[bytes, bytes]  # {SHA-256 of a key: whose prompts its own may begin with}; or none
    hosts: list[str]  # names that a request may give the server; none: any

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._guarded(self.health, is_open=True), methods=["GET"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self.model), methods=["GET"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.complete), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self.embed), methods=["POST"]),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Bounded, most=self.limits.requests)],
            exception_handlers={HTTPException: _told, 500: _failed},
        )

    # ---- routes

    async def health(self, _: Request) -> Response:
        waiting, is_busy = self.engine.load()
        return JSONResponse({"status": "ok", "waiting": waiting, "busy": is_busy})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        given = parse(Chat, await self._body(request))
        given.check()
        self._check_model(given.model)
        self._check_count("messages", len(given.messages))
        prompts = self._prompts()

        def prepared() -> tuple[str, list[int], int]:
            prompt, ids = prompts.of_chat(given)
            return prompt, ids, prompts.room(ids, given.most(), "messages")

        def reply_to(prompt: str) -> ChatReply:
            return ChatReply(self.name, prompt, takes_calls=given.functions() is not None)

        return await self._answer(request, given, prepared, reply_to)

    async def complete(self, request: Request) -> Response:
        given = parse(Completion, await self._body(request))
        given.check()
        self._check_model(given.model)
        prompts = self._prompts()

        def prepared() -> tuple[str, list[int], int]:
            prompt, ids = prompts.of_completion(given)
            return prompt, ids, prompts.room(ids, given.max_tokens or _DEFAULT_NEW, "prompt")

        return await self._answer(request, given, prepared, lambda _: CompletionReply(self.name))

    async def embed(self, request: Request) -> Response:
        given = parse(Embedding, await self._body(request))
        self._check_model(given.model)
        inputs = given.inputs()
        self._check_count("input", len(inputs))

        async def work() -> Response:
            texts = await feed.within(asyncio.to_thread(self.embedder.tokens_of, inputs))
            feed.submit(Task(self.embedder.vectors(texts, feed.is_closed), feed.tell))
            vectors = await feed.result()
            as_text = given.encoding_format == "base64"
            data = [
                {"object": "embedding", "index": i, "embedding": _encoded(vector, as_text)}
                for i, vector in enumerate(vectors)
            ]
            count = sum(map(len, texts))
            usage = {"prompt_tokens": count, "total_tokens": count}
            return JSONResponse(
                {"object": "list", "data": data, "model": self.name, "usage": usage}
            )

        with closing(Feed(self.engine, self.limits.seconds)) as feed:
            return await _unless_gone(request, work())

    # ---- answers

    async def _answer(
        self,
        request: Request,
        given: Generation,
        prepared: Callable[[], tuple[str, list[int], int]],
        reply_to: Callable[[str], CompletionReply],
    ) -> Response:
        """prepared: the prompt, its tokens, and how many may follow."""
        feed, prompts = Feed(self.engine, self.limits.seconds), self._prompts()

        def job() -> Job:
            wanted = given.form()  # a schema may have megabytes
            prompt, ids, room = prepared()
            options = given.options(room)
            options.form = prompts.form(wanted, prompt, ids)
            return Job(prompt, ids, options, given.seed, feed.tell, request.state.owner)

        try:
            made = await _unless_gone(request, feed.within(asyncio.to_thread(job)))
            feed.submit(made)
            prompt = made.prompt
            reply = reply_to(prompt)
            if given.stream:
                return _Events(_events(feed, reply, given.tells_usage()), feed)
            answer = await _unless_gone(request, _whole(feed, reply))
        except BaseException:
            feed.close()
            raise
        feed.close()
        return JSONResponse(answer)

    # ---- what is refused

    def _guarded(
        self, route: Callable[[Request], Awaitable[Response]], is_open: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """is_open: for those without the key, too."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_host(request)
                if not is_open:
                    request.state.owner = self._owner(request)
                return await route(request)
            except ApiError as error:
                return refused(error)
            except ClientDisconnect:
                return Response(status_code=499)
            finally:
                if getattr(request.state, "is_large", False):
                    give_memory_back()

        return guarded

    def _check_host(self, request: Request) -> None:
        """A page of another site, whose name leads to this machine, is refused by its name."""
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if self.hosts and host not in self.hosts:
            raise ApiError(400, f"Host {host!r} is no name of this server", code="wrong_host")

    def _owner(self, request: Request) -> bytes:
        """Whose the request is. ApiError 401: nobody's."""
        if not self.owners:
            return b""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Of hashes the time of a comparison says nothing about a key.
        owner = self.owners.get(hashlib.sha256(given.encode()).digest())
        if kind.lower() != "bearer" or owner is None:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        return owner

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"model {name!r} is not here; this server has {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _check_count(self, field: str, count: int) -> None:
        if count > self.limits.messages:
            raise ApiError(400, f"{field}: {count}; at most {self.limits.messages}", field)

    def _prompts(self) -> Prompts:
        if self.prompts is None:
            raise ApiError(400, f"{self.name} generates no text; it has embeddings", "model")
        return self.prompts

    async def _body(self, request: Request) -> bytes:
        """ApiError 408, 413, 415: it comes too slowly, is too large, is not said to be JSON."""
        # A page of any site may post other types to this machine without being asked.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Content-Type must be application/json")
        body = bytearray()
        try:
            with anyio.fail_after(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body:
                        message = f"the body has more than {self.limits.body} bytes"
                        raise ApiError(413, message, code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body took more than {_BODY_SECONDS:g} s") from None
        request.state.is_large = len(body) > LARGE
        return bytes(body)

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": _STARTED, "owned_by": "metalmm"}


_STARTED = int(time.time())


class _Events:
    """Server-sent events; when they end, however that is, so does the computing."""

    def __init__(self, events: AsyncIterator[str], feed: Feed) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response = StreamingResponse(events, media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, *given: Any) -> None:
        try:
            await self._response(*given)
        finally:
            self._feed.close()


async def _events(feed: Feed, reply: CompletionReply, tells_usage: bool) -> AsyncIterator[str]:
    for chunk in reply.first():
        yield _event(chunk)
    try:
        async for came in feed.pieces():
            chunks = reply.end(came) if isinstance(came, Finish) else reply.feed(came)
            for chunk in chunks:
                yield _event(chunk)
            if isinstance(came, Finish) and tells_usage:
                yield _event(reply.usage(came))
    except ApiError as error:
        yield _event(error.body())
        return
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _whole(feed: Feed, reply: CompletionReply) -> dict[str, Any]:
    async for came in feed.pieces():
        if isinstance(came, Finish):
            for _ in reply.end(came):
                pass
            return reply.whole(came)
        for _ in reply.feed(came):
            pass
    raise AssertionError("the pieces end with a Finish")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _Found]) -> _Found:
    """What the work gives. ClientDisconnect: the client goes before."""

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


def _encoded(vector: Any, as_text: bool) -> Any:
    """Numbers, or their bytes as f32, little-endian."""
    if not as_text:
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


async def _told(_: Request, error: Exception) -> Response:
    """Of Starlette: no such path, a method that is not there."""
    assert isinstance(error, HTTPException)
    body = ApiError(error.status_code, error.detail).body()
    return JSONResponse(body, error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    return refused(ApiError(500, f"the server failed: {type(error).__name__}"))

"""The routes, who may use them, and how much a request may take."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ... import __version__
from .access import Access, body_of
from .answering import Answering, unless_gone
from .embedding import Embedder
from .engine import Engine, Task
from .errors import ApiError, naming, wrong
from .feed import Feed
from .messages import Messages
from .metrics import Metrics
from .ollama import OllamaChat, OllamaGenerate, OllamaShow
from .prompts import Prompts
from .responses import Responses
from .schema import Asked, Chat, Completion, Embedding, Generation, parse, warn_once
from .tokens import give_memory_back
from .wire import Bounded, refused

Handler = Callable[[Request], Awaitable[Response]]
_Asked = TypeVar("_Asked")
# By the path: what asks for a text.
_TEXTS: dict[str, type[Asked]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/messages": Messages,
    "/v1/responses": Responses,
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
}


@dataclass(frozen=True)
class Limits:
    body: int  # bytes
    messages: int  # most messages of a chat, and texts of a request for embeddings
    seconds: float  # limit of a request, the time it waits included
    requests: int  # at a time, those that are still read included


@dataclass(frozen=True)
class Server:
    """The parts that the routes need."""

    name: str  # the model's name
    engine: Engine
    prompts: Prompts | None  # None: the model generates no text
    embedder: Embedder
    limits: Limits
    access: Access
    has_scores: bool  # as Answering's
    metrics: Metrics = field(default_factory=Metrics)

    def app(self) -> Starlette:
        gets = {
            "/health": self.health,
            "/metrics": self.told_metrics,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/api/tags": self.tags,
            "/api/version": self.version,
        }
        posts: dict[str, Handler] = {
            "/v1/embeddings": self.embed,
            "/v1/messages/count_tokens": self.count,
            "/api/show": self.show,
            **{path: partial(self.text, kind) for path, kind in _TEXTS.items()},
        }
        routes = [
            Route(path, self._guarded(path, handler), methods=[method])
            for method, handlers in (("GET", gets), ("POST", posts))
            for path, handler in handlers.items()
        ]
        middleware = [Middleware(Bounded, most=self.limits.requests)]
        if origins := self.access.origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=origins,
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                )
            )
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: _told, 500: _failed},
        )

    # ---- routes

    async def health(self, _: Request) -> Response:
        waiting, is_busy = self.engine.load()
        return JSONResponse({"status": "ok", "waiting": waiting, "busy": is_busy})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.name:
            message = f"model {name!r} is not here; this server has {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._model())

    async def tags(self, _: Request) -> Response:
        modified = datetime.fromtimestamp(_STARTED, timezone.utc).isoformat()
        names = {"name": self.name, "model": self.name, "modified_at": modified}
        return JSONResponse({"models": [{**names, "size": 0, "digest": "", "details": {}}]})

    async def show(self, request: Request) -> Response:
        await self._asked(request, OllamaShow)
        told = {"capabilities": ["embedding"], "model_info": {}}
        return JSONResponse({"details": {}} | (self.prompts.facts() if self.prompts else told))

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def told_metrics(self, _: Request) -> Response:
        kind = "text/plain; version=0.0.4"
        return PlainTextResponse(self.metrics.text(self.engine), media_type=kind)

    async def text(self, kind: type[Asked], request: Request) -> Response:
        asked = await self._asked(request, kind)
        if (loaded := asked.loaded(self.name)) is not None:
            return JSONResponse(loaded)
        with naming(asked.names):
            given = asked.made()
            prompts, seconds = self._checked(given), self.limits.seconds
            answering = Answering(
                self.name, self.engine, prompts, seconds, self.has_scores, self.metrics
            )
            return await answering.answer(request, asked, given)

    async def count(self, request: Request) -> Response:
        asked = await self._asked(request, Messages)
        with naming(asked.names):
            given = asked.made()
            prompts = self._checked(given)
            with closing(Feed(self.engine, self.limits.seconds)) as feed:
                made = feed.within(asyncio.to_thread(prompts.of_chat, given))
                return JSONResponse({"input_tokens": len((await unless_gone(request, made)).ids)})

    async def embed(self, request: Request) -> Response:
        given = parse(Embedding, await body_of(request, self.limits.body))
        self._note_model(given)
        inputs = given.inputs()
        self._check_count("input", inputs)
        size = self.embedder.size_of(given.dimensions)

        async def work() -> Response:
            texts = await feed.within(asyncio.to_thread(self.embedder.tokens_of, inputs))
            work = self.embedder.vectors(texts, feed.is_closed, size)
            feed.submit([Task(work, feed.tell)])
            _, vectors = await feed.result()
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
            return await unless_gone(request, work())

    # ---- what is refused

    def _guarded(self, path: str, handler: Handler) -> Handler:
        """The handler of requests that may be, each of which is counted."""

        async def guarded(request: Request) -> Response:
            status = 499
            try:
                self.access.check(request, is_open=path == "/health")
                response = await handler(request)
                status = response.status_code
                return response
            except ApiError as error:
                status = error.status
                return refused(path, error)
            except ClientDisconnect:
                return Response(status_code=status)
            finally:
                self.metrics.requested(path, status)
                if getattr(request.state, "is_large", False):
                    give_memory_back()

        return guarded

    def _checked(self, given: Generation) -> Prompts:
        """ApiError: a field is wrong, the model has no answers."""
        given.check()
        self._note_model(given)
        if self.prompts is None:
            raise ApiError(400, f"{self.name} generates no text; it has embeddings", "model")
        return self.prompts

    def _note_model(self, given: Generation | Embedding) -> None:
        if given.model not in (None, self.name):
            warn_once(f"model: requests name others; {self.name} answers them all")

    async def _asked(self, request: Request, kind: type[_Asked]) -> _Asked:
        """The body's request. ApiError: it is malformed, or a list is longer than it may be."""
        asked = parse(kind, await body_of(request, self.limits.body))
        for name in ("messages", "input", "tools"):
            self._check_count(name, getattr(asked, name, None))
        return asked

    def _check_count(self, name: str, items: Any) -> None:
        if isinstance(items, list) and len(items) > self.limits.messages:
            raise wrong(name, f"{len(items)}; at most {self.limits.messages}")

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": _STARTED, "owned_by": "metalmm"}


_STARTED = int(time.time())


def _encoded(vector: Any, as_text: bool) -> Any:
    """Numbers, or their bytes as f32, little-endian."""
    if not as_text:
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


async def _told(request: Request, error: Exception) -> Response:
    """The response to an error of Starlette: no such path, a method that is not there."""
    assert isinstance(error, HTTPException)
    response = refused(request.url.path, ApiError(error.status_code, error.detail))
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    told = ApiError(500, f"the server failed: {type(error).__name__}")
    return refused(request.url.path, told)

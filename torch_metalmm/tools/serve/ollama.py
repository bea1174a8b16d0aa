"""Ollama's /api/chat: its requests as chats, and answers in its shape."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from .blocks import objects
from .engine import Finish
from .errors import ApiError, unsupported, wrong
from .replies import ChatReply, Object
from .schema import Chat, Request, validated, warn_once
from .weights import Scored

# By the names of `options`: fields of a chat.
_OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# How the model is loaded and where, which the server said when it began.
_HINTS = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"),
    *("use_mmap", "use_mlock", "low_vram", "f16_kv", "vocab_only", "logits_all", "embedding_only"),
}
# Numbers for what a chat says by leaving the field out; num_predict: to the end, or the context's.
_DEFAULTS = {"top_k": (0,), "seed": (-1,), "num_predict": (-1, -2)}
# By a field of a chat: what clients call it.
_NAMES = {own: f"options: {name}" for name, own in _OPTIONS.items()}
_NAMES |= {"reasoning_effort": "think", "response_format": "format"}


@dataclass(kw_only=True)
class OllamaChat(Request):
    messages: Any
    tools: Any = None
    think: bool | str | None = None
    format: Any = None
    options: dict[str, Any] | None = None
    stream: bool | None = True

    def chat(self) -> Chat:
        """ApiError 400: it says what no chat can."""
        thinks = self.think if isinstance(self.think, bool) else None
        given = {
            "model": self.model,
            "messages": [*_translated(objects(self.messages, "messages"))],
            "stream": self.stream,
            "tools": self.tools,
            "response_format": self._format(),
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "chat_template_kwargs": None if thinks is None else {"enable_thinking": thinks},
        }
        given = {name: value for name, value in given.items() if value is not None}
        try:
            made = validated(Chat, given | self._sampling())
            made.check()
        except ApiError as error:
            name = _NAMES.get(error.param or "", error.param)
            message = str(error).replace(f"{error.param}:", f"{name}:", 1)
            raise ApiError(error.status, message, name) from None
        return made

    def _format(self) -> Object | None:
        if not self.format:
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if not isinstance(self.format, dict):
            raise wrong("format", "must be 'json' or a schema, an object")
        return {"type": "json_schema", "json_schema": {"schema": self.format}}

    def _sampling(self) -> Object:
        found: Object = {}
        for name, value in (self.options or {}).items():
            if name in _HINTS:
                warn_once(f"options: {name}: ignored, as it changes no answer")
            elif name not in _OPTIONS and value is not None:
                raise unsupported("options", f"{name} is not known, or not supported")
            elif value is not None and not _is_default(name, value):
                found[_OPTIONS[name]] = value
        return found


def _is_default(name: str, value: Any) -> bool:
    return type(value) is int and value in _DEFAULTS.get(name, ())


def _translated(messages: list[Object]) -> Iterator[Object]:
    """Calls get ids, by their places, and results those of their calls, where clients give none."""
    waiting: list[Object] = []  # calls whose results are to come
    for place, message in enumerate(messages):
        told: Object = {"role": message.get("role"), "content": message.get("content", "")}
        if message.get("images"):
            told["content"] = [*_parts(message)]
        if message.get("thinking"):
            told["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            told["tool_calls"] = waiting = [*_calls(message["tool_calls"], place)]
        if message.get("role") == "tool":
            name, own = message.get("tool_name"), message.get("tool_call_id")
            call = next(
                (c for c in waiting if own == c["id"] or name == c["function"]["name"]),
                waiting[0] if waiting else {},
            )
            waiting = [c for c in waiting if c is not call]
            told["tool_call_id"] = own or call.get("id")
            told["name"] = name or call.get("function", {}).get("name")
        yield {name: value for name, value in told.items() if value is not None}


def _parts(message: Object) -> Iterator[Object]:
    """The images, which have no places in the text, and the text."""
    images = message["images"]
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise wrong("messages", "images must be a list of images in base64")
    for image in images:
        yield {"type": "image_url", "image_url": f"data:image;base64,{image}"}
    if message.get("content"):
        yield {"type": "text", "text": message["content"]}


def _calls(given: Any, place: int) -> Iterator[Object]:
    """Ids of 9 letters or digits, as Mistral's templates demand."""
    for i, call in enumerate(objects(given, "messages")):
        (function,) = objects([call.get("function")], "messages")
        named = {"name": function.get("name"), "arguments": function.get("arguments")}
        own = call.get("id") or f"{place:06}{i:03}"
        yield {"id": own, "type": "function", "function": named}


def refusal(error: ApiError) -> Object:
    """The body of an error's response."""
    return {"error": error.body()["error"]["message"]}


class OllamaReply:
    """A Reply in Ollama's shape: a line of JSON for each piece."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, choice: ChatReply) -> None:
        self._model, self._choice = model, choice
        self._begun, self._first = time.monotonic_ns(), 0

    def first(self) -> Iterator[str]:
        return iter(())

    def feed(self, _: int, came: str | Scored | Finish) -> Iterator[str]:
        self._first = self._first or time.monotonic_ns()
        for chunk in self._choice.feed(came):
            delta = chunk["delta"]
            message = _message(
                delta.get("content", ""),
                delta.get("reasoning_content", ""),
                delta.get("tool_calls", []),
            )
            if len(message) > 2 or message["content"]:
                yield _line({**self._head(), "message": message, "done": False})

    def last(self) -> Iterator[str]:
        yield _line({**self._head(), "message": _message("", "", []), **self._end()})

    def failed(self, error: ApiError) -> str:
        return _line(refusal(error))

    def whole(self) -> Object:
        told = self._choice.whole()["message"]
        message = _message(told["content"] or "", self._choice.thought, self._choice.calls)
        return {**self._head(), "message": message, **self._end()}

    def _head(self) -> Object:
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def _end(self) -> Object:
        """Times in nanoseconds; that of loading is of no request."""
        finish, now = self._choice.finish, time.monotonic_ns()
        first = self._first or now
        return {
            "done": True,
            "done_reason": finish.reason,
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": finish.prompt_tokens,
            "prompt_eval_duration": first - self._begun,
            "eval_count": finish.new_tokens,
            "eval_duration": now - first,
        }


def _message(content: str, thinking: str, calls: list[Object]) -> Object:
    message: Object = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        functions = [call["function"] for call in calls]
        message["tool_calls"] = [
            {"function": {"name": f["name"], "arguments": json.loads(f["arguments"])}}
            for f in functions
        ]
    return message


def _line(value: Object) -> str:
    # Clients split streams at other characters too, as U+2028: none is written.
    return json.dumps(value) + "\n"

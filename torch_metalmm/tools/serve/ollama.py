"""Ollama's /api/chat and /api/generate: requests as chats or completions, answers in its shape."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, ClassVar, TypeVar

from ..writing import Finish
from .blocks import objects
from .engine import Prompt
from .errors import ApiError, unsupported, wrong
from .replies import Choice, Object, Piece, Reply, scores_of
from .schema import Asked, Chat, Completion, Request, validated, warn_once
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
    *("mirostat_tau", "mirostat_eta"),  # numbers of mirostat, which is refused
}
# Values that say what is so without the option. num_predict: to the end, or the context's;
# penalties are for all tokens.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **{"top_k": (0,), "seed": (-1,), "num_predict": (-1, -2), "repeat_last_n": (-1,)},
    **{"mirostat": (0, 0.0, False), "penalize_newline": (True,)},
    **dict.fromkeys(("typical_p", "tfs_z"), (1, 1.0)),
}
_Made = TypeVar("_Made", Chat, Completion)


@dataclass(kw_only=True)
class _Ollama(Asked):
    names = {
        **{own: f"options: {name}" for name, own in _OPTIONS.items()},
        **dict.fromkeys(("reasoning_effort", "chat_template_kwargs"), "think"),
        **{"response_format": "format", "images": "messages"},
    }
    texts: ClassVar[dict[str, Any]]  # the fields that ask for a text, and what they are without one
    think: bool | str | None = None
    format: Any = None
    options: dict[str, Any] | None = None
    stream: bool | None = True
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def told(self, piece: Piece) -> Object:
        """The fields of an answer, or of a part of one."""
        raise NotImplementedError

    def loaded(self, model: str) -> Object | None:
        if any(getattr(self, name) not in (None, empty) for name, empty in self.texts.items()):
            return None
        return {**_head(model), **self.told(Piece()), "done": True, "done_reason": "load"}

    def reply(self, model: str, given: Any, prompts: list[Prompt], choices: list[Any]) -> Reply:
        return OllamaReply(model, choices[0], self.told)

    def _chat(self, messages: list[Object], tools: Any = None) -> Chat:
        thinks = self.think if isinstance(self.think, bool) else None
        own = {
            "messages": [*_translated(messages)],
            "tools": tools,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "chat_template_kwargs": None if thinks is None else {"enable_thinking": thinks},
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }
        return self._made(Chat, own)

    def _made(self, kind: type[_Made], own: Object) -> _Made:
        given = {"model": self.model, "stream": self.stream, "response_format": self._format()}
        given = {name: value for name, value in (given | own).items() if value is not None}
        return validated(kind, given | self._sampling())

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
        options = dict(self.options or {})
        if options.get("repeat_penalty") in (None, 1):
            options.pop("repeat_last_n", None)  # tokens for which nothing is multiplied by 1
        for name, value in options.items():
            if name in _HINTS:
                warn_once(f"options: {name}: ignored, as it changes no answer")
            elif value is None or _is_default(name, value):
                continue
            elif name not in _OPTIONS:
                raise unsupported("options", f"{name} is not known, or not supported")
            else:
                found[_OPTIONS[name]] = value
        return found


@dataclass(kw_only=True)
class OllamaChat(_Ollama):
    texts = {"messages": []}
    messages: Any = None
    tools: Any = None

    def made(self) -> Chat:
        return self._chat(objects(self.messages, "messages"), self.tools)

    def told(self, piece: Piece) -> Object:
        message: Object = {"role": "assistant", "content": piece.content}
        if piece.thought:
            message["thinking"] = piece.thought
        if piece.calls:
            functions = [call["function"] for call in piece.calls]
            message["tool_calls"] = [
                {"function": {"name": f["name"], "arguments": json.loads(f["arguments"])}}
                for f in functions
            ]
        return {"message": message}


@dataclass(kw_only=True)
class OllamaGenerate(_Ollama):
    names = _Ollama.names | {"messages": "prompt", "images": "images"}
    texts = {"prompt": "", "suffix": "", "images": []}
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    images: Any = None
    raw: bool | None = None
    template: str | None = None
    context: Any = None

    def made(self) -> Chat | Completion:
        """A completion where no chat template makes the prompt."""
        is_raw = bool(self.raw or self.suffix)
        for name in ("template", "context"):
            if getattr(self, name):
                raise unsupported(name, "not supported")
        for name in ("system", "images", "think", "logprobs", "top_logprobs") if is_raw else ():
            if getattr(self, name):
                raise unsupported(name, "not with raw or suffix")
        if is_raw:  # to the end, as there; OpenAI's default is 16 tokens
            own = {"prompt": self.prompt, "suffix": self.suffix, "max_tokens": -1}
            return self._made(Completion, own)
        said = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": self.prompt, "images": self.images}
        return self._chat([*said, user])

    def told(self, piece: Piece) -> Object:
        thinking = {"thinking": piece.thought} if piece.thought else {}
        return {"response": piece.content, **thinking}


@dataclass(kw_only=True)
class OllamaShow(Request):
    name: str | None = None  # older clients' `model`
    verbose: bool | None = None


def _is_default(name: str, value: Any) -> bool:
    return any(type(value) is type(d) and value == d for d in _DEFAULTS.get(name, ()))


def _translated(messages: list[Object]) -> Iterator[Object]:
    """Calls get ids, by their places, and results those of their calls, where clients give none."""
    waiting: list[Object] = []  # calls whose results are to come
    for place, message in enumerate(messages):
        told: Object = {"role": message.get("role"), "content": message.get("content", "")}
        if message.get("images") not in (None, []):
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
        raise wrong("images", "images must be a list of images in base64")
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


def _head(model: str) -> Object:
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


class OllamaReply:
    """A Reply in Ollama's shape: a line of JSON for each piece."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, choice: Choice, told: Callable[[Piece], Object]) -> None:
        """told: the fields of a piece."""
        self._model, self._choice, self._told = model, choice, told
        self._begun, self._first = time.monotonic_ns(), 0

    def first(self) -> Iterator[str]:
        return iter(())

    def feed(self, _: int, came: str | Scored | Finish) -> Iterator[str]:
        self._first = self._first or time.monotonic_ns()
        for piece in self._choice.feed(came):
            if any(piece[:4]):
                yield _line(self._object(piece) | {"done": False})

    def last(self) -> Iterator[str]:
        yield _line(self._object(Piece()) | self._end())

    def failed(self, error: ApiError) -> str:
        return _line(refusal(error))

    def whole(self) -> Object:
        return self._object(self._choice.whole) | self._end()

    def _object(self, piece: Piece) -> Object:
        scores = scores_of(piece.scored, self._choice.spell)
        told = {**_head(self._model), **self._told(piece)}
        return told | ({"logprobs": scores} if scores else {})

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


def _line(value: Object) -> str:
    # Clients split streams at other characters too, as U+2028: none is written.
    return json.dumps(value) + "\n"

"""The bodies of requests: fields of OpenAI's API, and what becomes of them."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, TypeVar, cast

from ..marks import CALL, MARKS
from ..writing import Options
from .calling import Calls, Wanted, calls_of, schema_text
from .engine import Prompt
from .errors import ApiError, unsupported, wrong
from .replies import ChatChoices, Choice, Choices, Object, Reply, Spell

_LOG = logging.getLogger(__name__)
# Fields that cannot change an answer: hints for a service's accounts, caches and machines, and what
# would shorten a prompt that is too long. A field that is neither here nor in a class is refused.
_HINTS = """user metadata store service_tier safety_identifier prompt_cache_key speed keep_alive
    prompt_cache_retention cache_prompt cache_control id_slot prediction client_metadata include
    context_management inference_geo diagnostics user_profile_id workspace_id truncate shift"""
IGNORED = frozenset(_HINTS.split())
_MOST_STOPS = 16
_NO_LIMIT = 1 << 30  # tokens; clients write -1, as llama.cpp's
# The least and the most of a number. logprobs of a chat is True or False.
_RANGES: dict[str, tuple[float, float | None]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (1, None),
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "repetition_penalty": (0.01, 100),  # logits times or by more may become infinite
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "n": (1, None),
    "logprobs": (0, 20),
    "top_logprobs": (0, 20),
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TEXTS: tuple[Literal["regex", "grammar"], ...] = ("regex", "grammar")
_Given = TypeVar("_Given")


@dataclass(kw_only=True)
class StreamOptions:
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "ignore"}
    include_usage: bool = False


@dataclass(kw_only=True)
class Request:
    """The fields that all requests have."""

    # A field of the Chat or Completion that it becomes, or "images": what clients call it.
    names: ClassVar[Mapping[str, str]] = {"images": "messages"}
    model: str | None = None  # the server has one, which answers whatever the name


class Asked(Request):
    """A request for a text, in the words of one API."""

    def loaded(self, model: str) -> Object | None:
        """The answer where no text is asked for, but for the model in memory."""
        return None

    def made(self) -> Chat | Completion:
        """The request in OpenAI's words. ApiError 400: they cannot say it."""
        raise NotImplementedError

    def as_chat(self, **own: Any) -> Chat:
        """A chat of this request's fields, by `names` where these are other words, and of `own`,
        which counts more."""
        named = {field.name: self.names.get(field.name, field.name) for field in fields(Chat)}
        return Chat(**{name: getattr(self, word, None) for name, word in named.items()} | own)

    def reply(self, model: str, given: Any, prompts: list[Prompt], choices: list[Choice]) -> Reply:
        """The answer in words of this API. given: what made() gave; choices: its own."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Generation(Asked):
    """The fields that chats and completions have in common."""

    shape: ClassVar[type[Choices]] = Choices
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Any = None  # lists are checked by hand: pydantic words an error for each of their items
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Any = None

    def check(self) -> None:
        """ApiError: a value out of its range, or of what is not there."""
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name, None) == -1:
                setattr(self, name, _NO_LIMIT)
        for name, bounds in _RANGES.items():
            _within(name, getattr(self, name, None), *bounds)
        if self.temperature is not None and 0 < self.temperature < 1e-3:
            raise wrong("temperature", f"{self.temperature}; 0, or from 0.001")
        self.biases()
        stops = self.stops()
        if len(stops) > _MOST_STOPS:
            raise wrong("stop", f"{len(stops)} texts; at most {_MOST_STOPS}")
        if not _all_are(str, stops) or "" in stops:
            raise wrong("stop", "must be a text or a list of texts, none empty")

    def form(self) -> Wanted | None:
        """The form of the answer, None: any. ApiError: two, or none that is known."""
        format = self.response_format or {"type": "text"}
        given = [Wanted(kind, kind, text) for kind in _TEXTS if (text := getattr(self, kind))]
        if format.get("type") == "json_object":
            given.append(Wanted("response_format", "json", '{"type": "object"}'))
        elif format.get("type") == "json_schema":
            named = format.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if not isinstance(schema, dict):
                raise wrong(
                    "response_format", "json_schema must be an object with a schema, an object"
                )
            given.append(Wanted("response_format", "json", schema_text(schema, "response_format")))
        elif format != {"type": "text"}:
            raise unsupported("response_format", "type must be text, json_object or json_schema")
        if len(given) > 1:
            raise wrong(given[0].field, f"given with {given[1].field}; an answer has one form")
        return given[0] if given else None

    def biases(self) -> dict[int, float]:
        """The numbers added to tokens' logits. ApiError: one is malformed, or beyond +-100."""
        given = {} if self.logit_bias is None else self.logit_bias
        try:
            found = {_token(key): float(value) for key, value in given.items()}
        except (AttributeError, ValueError, TypeError, OverflowError):
            found = {-1: 0.0}
        if any(token < 0 or not abs(bias) <= 100 for token, bias in found.items()):
            raise wrong("logit_bias", "must be an object of tokens' numbers, each with -100 to 100")
        return found

    def stops(self) -> list[str]:
        given = [] if self.stop is None else self.stop
        return given if isinstance(given, list) else [given]

    def options(self, most: int) -> Options:
        """OpenAI's defaults: temperature 1 and no other limit. most: of new tokens."""
        return Options(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repeat_penalty=self.repetition_penalty,
            stops=self.stops(),
            max_new_tokens=most,
        )

    def scored(self) -> int | None:
        """How many tokens are scored beside each of the answer; None: not that one either."""
        return None

    def reply(self, model: str, given: Any, prompts: list[Prompt], choices: list[Choice]) -> Reply:
        tells_usage = self.stream_options is not None and self.stream_options.include_usage
        return self.shape(model, choices, self.n or 1, tells_usage)


@dataclass(kw_only=True)
class Chat(Generation):
    shape = ChatChoices
    messages: Any
    max_completion_tokens: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Any = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "only with logprobs")
        if not _all_are(dict, self.messages) or not self.messages:
            raise wrong("messages", "must be a list of objects, not empty")
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", "answers are ['text']")
        effort = self.reasoning_effort
        if effort is not None and effort not in _EFFORTS:
            raise wrong("reasoning_effort", f"must be one of {', '.join(_EFFORTS)}")
        for name in _templates_own() & (self.chat_template_kwargs or {}).keys():
            raise wrong("chat_template_kwargs", f"{name} is the server's")
        _ = self.calls

    def made(self) -> Chat:
        return self

    def count(self) -> int:
        """How many prompts it has."""
        return 1

    def choices(self, prompts: list[Prompt], spell: Spell) -> list[Choice]:
        """The answers, n to each prompt. spell: as Prompts.spelled."""
        (prompt,) = prompts
        return [Choice(spell, prompt.text, self.calls) for _ in range(self.n or 1)]

    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @cached_property
    def calls(self) -> Calls:
        return calls_of(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    def form(self) -> Wanted | None:
        """The form of the call that must come. Where calls may come, no other form is allowed."""
        own = super().form()
        if own is not None and self.calls.tools and not self.calls.is_forced:
            raise wrong(own.field, "given with tools that may be called; an answer has one form")
        return self.calls.form() or own

    def options(self, most: int) -> Options:
        found = super().options(most)
        if self.calls.tools and not self.calls.are_many:
            ends = [mark.closes for mark in MARKS if mark.kind == CALL and mark.closes]
            found.stops = found.stops + ends
        return found

    def variables(self) -> dict[str, Any]:
        """The chat template's variables beside messages and tools."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort is not None:  # the switch of templates that have no effort
            given |= {"enable_thinking": effort != "none"}
        return given | (self.chat_template_kwargs or {})

    def scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass(kw_only=True)
class Completion(Generation):
    prompt: Any
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "must be n, or be left out")
        self.prompt = _texts("prompt", self.prompt)
        if self.suffix and not _all_are(str, self.prompt):
            raise wrong("suffix", "only with a text as prompt")
        for name in ("suffix", "logprobs"):
            if self.echo and getattr(self, name) not in (None, ""):
                raise unsupported("echo", f"not with {name}")

    def made(self) -> Completion:
        return self

    def count(self) -> int:
        return len(self.prompt)

    def choices(self, prompts: list[Prompt], spell: Spell) -> list[Choice]:
        texts = [prompt.text if self.echo else "" for prompt in prompts for _ in range(self.n or 1)]
        return [Choice(spell, before=text) for text in texts]

    def scored(self) -> int | None:
        return self.logprobs


@dataclass(kw_only=True)
class Embedding(Request):
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """A list of texts, or of tokens of texts. ApiError: one is empty, or there is none."""
        _within("dimensions", self.dimensions, 1)
        return _texts("input", self.input)


def parse(kind: type[_Given], body: bytes) -> _Given:
    """The body as a request of that kind. ApiError 400: which field is wrong, and how.

    What its fields quote in an answer is JSON and Unicode, as no body with infinity or half a
    surrogate pair is.
    """
    try:
        given = json.loads(body, parse_constant=_number, parse_float=_number)
        if b"\\ud" in body.lower():
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be an object")
    for name in IGNORED & given.keys():
        if given.pop(name) is not None:
            warn_once(f"{name}: ignored, as it changes no answer")
    given = {name: value for name, value in given.items() if value is not None}
    # Pydantic would word an error for each.
    if unknown := given.keys() - {field.name for field in fields(cast(Any, kind))}:
        name = min(unknown)
        raise unsupported(name, "it is not known, or not supported")
    return validated(kind, given)


def validated(kind: type[_Given], given: dict[str, Any]) -> _Given:
    """A request of that kind, of its fields. ApiError 400: one is of another type."""
    from pydantic import ValidationError

    try:
        found: _Given = _adapter(cast(Any, kind)).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise wrong(name, first["msg"]) from None
    return found


def _number(text: str) -> float:
    """ValueError: it is none, or too large for one."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number")
    return value


@cache
def warn_once(message: str) -> None:
    """message: one of a few, whatever clients send."""
    _LOG.warning(message)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


@cache
def _templates_own() -> frozenset[str]:
    """Names of a chat template that are no variables of a request."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return frozenset({"messages", *inspect.signature(render_jinja_template).parameters})


def _all_are(kind: type, given: Any) -> bool:
    """Whether it is a list of these, of which True is no number."""
    return isinstance(given, list) and all(type(item) is kind for item in given)


def _texts(name: str, given: Any) -> list[str] | list[list[int]]:
    """The field as a list of texts, or of tokens of texts. ApiError: one is empty, or is none."""
    if isinstance(given, str) or (given and _all_are(int, given)):
        given = [given]
    is_of_tokens = isinstance(given, list) and all(_all_are(int, text) for text in given)
    if not _all_are(str, given) and not is_of_tokens:
        raise wrong(name, "must be a text, a list of tokens, or a list of either")
    if not given or not all(given):
        raise wrong(name, "must not be empty")
    found: list[str] | list[list[int]] = given
    return found


def _token(key: str) -> int:
    """ValueError: it is no number of a token."""
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise ValueError(key)
    return int(key)


def _within(name: str, value: float | None, least: float, most: float | None = None) -> None:
    if value is None:
        return
    if not (value >= least and (most is None or value <= most)):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise wrong(name, f"{value}; must be {allowed}")

"""The bodies of requests: fields of OpenAI's API, and what becomes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, cast

from ..chat.session import Options
from .errors import ApiError

_MOST_STOPS = 16
_TEXTS: tuple[Literal["regex", "grammar"], ...] = ("regex", "grammar")
_Given = TypeVar("_Given")


@dataclass(kw_only=True)
class StreamOptions:
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "ignore"}
    include_usage: bool = False


@dataclass(kw_only=True)
class Request:
    """What all have. An unknown field is refused: it may be one that changes the answer."""

    model: str
    user: Any = None  # these say nothing about the answer
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


@dataclass(frozen=True)
class Wanted:
    """The form that an answer has: what the field asks for."""

    field: str
    kind: Literal["json", "regex", "grammar"]
    text: str  # a JSON schema, a regular expression, a grammar in Lark's syntax


@dataclass(kw_only=True)
class Generation(Request):
    """What chats and completions have."""

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
    # Fields that have one value here: their default.
    n: Literal[1] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Any = None

    def check(self) -> None:
        """ApiError: a value out of its range, or of what is not there."""
        _within("temperature", self.temperature, 0, 2)
        _within("top_p", self.top_p, 0, 1)
        _within("min_p", self.min_p, 0, 1)
        _within("top_k", self.top_k, 1)
        _within("max_tokens", self.max_tokens, 1)
        _within("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.temperature is not None and 0 < self.temperature < 1e-3:
            raise ApiError(400, f"temperature: {self.temperature}; 0, or from 0.001", "temperature")
        # Logits times or by more may become infinite.
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported; leave it out", name, "unsupported")
        stops = self.stops()
        if len(stops) > _MOST_STOPS:
            raise ApiError(400, f"stop: {len(stops)} texts; at most {_MOST_STOPS}", "stop")
        if not _all_are(str, stops) or "" in stops:
            raise ApiError(400, "stop: must be a text or a list of texts, none empty", "stop")

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
                message = "response_format: json_schema must be an object with a schema, an object"
                raise ApiError(400, message, "response_format")
            given.append(Wanted("response_format", "json", _schema_text(schema)))
        elif format != {"type": "text"}:
            message = "response_format: type must be text, json_object or json_schema"
            raise ApiError(400, message, "response_format", "unsupported")
        if len(given) > 1:
            both = f"{given[0].field}: given with {given[1].field}; an answer has one form"
            raise ApiError(400, both, given[0].field)
        return given[0] if given else None

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

    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(kw_only=True)
class Chat(Generation):
    messages: Any
    max_completion_tokens: int | None = None
    tools: Any = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    def check(self) -> None:
        super().check()
        _within("max_completion_tokens", self.max_completion_tokens, 1)
        if not _all_are(dict, self.messages) or not self.messages:
            raise ApiError(400, "messages: must be a list of objects, not empty", "messages")
        if self.tools is not None and not _all_are(dict, self.tools):
            raise ApiError(400, "tools: must be a list of objects", "tools")

    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def functions(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None


@dataclass(kw_only=True)
class Completion(Generation):
    prompt: Any
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    logprobs: None = None

    def check(self) -> None:
        super().check()
        given = self.prompt
        if _all_are(str, given) and given:
            if len(given) > 1:
                raise ApiError(400, f"prompt: {len(given)} texts; give one", "prompt")
            given = given[0]
        if not isinstance(given, str) and not _all_are(int, given):
            raise ApiError(400, "prompt: must be a text, or a list of tokens", "prompt")
        if not given:
            raise ApiError(400, "prompt: must not be empty", "prompt")
        self.prompt = given


@dataclass(kw_only=True)
class Embedding(Request):
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """A list of texts, or of tokens of texts. ApiError: one is empty, or there is none."""
        given = self.input
        if isinstance(given, str) or (given and _all_are(int, given)):
            given = [given]
        if not isinstance(given, list) or not (
            _all_are(str, given) or all(_all_are(int, text) for text in given)
        ):
            message = "input: must be a text, a list of tokens, or a list of either"
            raise ApiError(400, message, "input")
        if not given or not all(given):
            raise ApiError(400, "input: must not be empty", "input")
        return given


def _schema_text(schema: dict[str, Any]) -> str:
    """ApiError: an integer that llguidance, which reads numbers as f64, would change."""

    def checked(digits: str) -> int:
        if abs(number := int(digits)) > 1 << 53:
            message = f"response_format: {number} in the schema; integers are at most 2^53"
            raise ApiError(400, message, "response_format")
        return number

    text = json.dumps(schema)
    json.loads(text, parse_int=checked)
    return text


def parse(kind: type[_Given], body: bytes) -> _Given:
    """The body as a request of that kind. ApiError 400: which field is wrong, and how."""
    from pydantic import ValidationError

    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be an object")
    # Pydantic would word an error for each.
    if unknown := given.keys() - {field.name for field in fields(cast(Any, kind))}:
        name = min(unknown)
        message = f"{name}: it is not known, or not supported"
        raise ApiError(400, message, name, "unsupported")
    try:
        found: _Given = _adapter(cast(Any, kind)).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise ApiError(400, f"{name}: {first['msg']}", name) from None
    return found


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _all_are(kind: type, given: Any) -> bool:
    """Whether it is a list of these, of which True is no number."""
    return isinstance(given, list) and all(type(item) is kind for item in given)


def _within(name: str, value: float | None, least: float, most: float | None = None) -> None:
    if value is None:
        return
    if not (value >= least and (most is None or value <= most)):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ApiError(400, f"{name}: {value}; must be {allowed}", name)

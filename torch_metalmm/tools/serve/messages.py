"""Anthropic's /v1/messages: its requests as chats, and answers in its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..marks import TEXT, THOUGHT
from .blocks import BlockReply, functions_of, new_id, objects, text_of
from .engine import Prompt
from .errors import ApiError, unsupported, wrong
from .replies import Choice, Object, Reply, event
from .schema import Asked, Chat

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


@dataclass(kw_only=True)
class Messages(Asked):
    names = {
        **{"images": "messages", "stop": "stop_sequences", "chat_template_kwargs": "thinking"},
        **dict.fromkeys(("response_format", "reasoning_effort"), "output_config"),
    }
    messages: Any
    max_tokens: int | None = None
    system: Any = None
    stop_sequences: Any = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: Any = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # whether; how much is the model's
    output_config: dict[str, Any] | None = None

    def made(self) -> Chat:
        choice = self.tool_choice or {"type": "auto"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        kind = choice.get("type")
        config = self.output_config or {}
        format, effort = config.get("format"), config.get("effort")
        thinks = None if self.thinking is None else self.thinking.get("type") != "disabled"
        if not (effort is None or isinstance(effort, str)):
            raise wrong("output_config", "effort must be a text")
        if config.keys() - {"format", "effort"} or not isinstance(format or {}, dict):
            raise unsupported("output_config", "must have an effort, or a format, an object")
        return self.as_chat(
            messages=self._messages(),
            tools=functions_of(self.tools, "input_schema"),
            tool_choice=named if kind == "tool" else _CHOICES.get(str(kind), kind),
            parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
            response_format=format and {"type": format.get("type"), "json_schema": format},
            reasoning_effort=effort,
            chat_template_kwargs=None if thinks is None else {"enable_thinking": thinks},
        )

    def reply(self, model: str, given: Chat, prompts: list[Prompt], choices: list[Choice]) -> Reply:
        return MessageReply(model, prompts[0], choices[0], given.stops())

    def _messages(self) -> list[Object]:
        system = text_of(self.system, ("text",), "system")
        found = [{"role": "system", "content": system}] if system else []
        for message in objects(self.messages, "messages"):
            found += _translated(message)
        return found


def _translated(message: Object) -> Iterator[Object]:
    """Results of tools are messages of their own, before what the user says to them."""
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    told: Object = {"role": message.get("role")}
    parts, calls = [], []
    for block in objects(blocks, "messages"):
        kind = block.get("type")
        if kind == "tool_result":
            content = block.get("content")  # a picture of the screen, for one
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            told["reasoning_content"] = str(block.get("thinking"))
        elif kind != "redacted_thinking":
            parts.append(block)
    if calls:
        told["tool_calls"] = calls
    if parts or len(told) > 1:
        yield told | {"content": parts}


def refusal(error: ApiError) -> Object:
    """The body of an error's response."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.body()["error"]["message"]
    return {
        "type": "error",
        "error": {"type": _KINDS.get(error.status, kind), "message": message},
    }


class MessageReply(BlockReply):
    """A Reply in Anthropic's shape."""

    def __init__(self, model: str, prompt: Prompt, choice: Choice, stops: list[str]) -> None:
        """stops: the client's, of the strings that end an answer."""
        super().__init__(choice)
        self._model, self._count, self._id = model, len(prompt.ids), new_id("msg")
        self._stops = stops

    def first(self) -> Iterator[str]:
        usage = {"input_tokens": self._count, "output_tokens": 0}
        yield _event("message_start", message=self._message(None, None, usage))

    def last(self) -> Iterator[str]:
        yield from self.closed()
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> str:
        return event(refusal(error), "error")

    def whole(self) -> Object:
        return {**self._message(*self._reason(), self._usage()), "content": self.blocks}

    def begin(self, kind: str) -> Iterator[str]:
        begun: Object = {"type": "text", "text": ""}
        if kind == THOUGHT:
            begun = {"type": "thinking", "thinking": "", "signature": ""}
        yield from self._begun(begun)

    def grow(self, kind: str, text: str) -> Iterator[str]:
        name = "text" if kind == TEXT else "thinking"
        self.blocks[-1][name] += text
        yield self._delta({"type": f"{name}_delta", name: text})

    def end(self, kind: str) -> Iterator[str]:
        yield _event("content_block_stop", index=len(self.blocks) - 1)

    def called(self, call: Object) -> Iterator[str]:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        yield from self._begun({**block, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        yield _event("content_block_stop", index=len(self.blocks) - 1)
        self.blocks[-1]["input"] = json.loads(function["arguments"])

    def _begun(self, block: Object) -> Iterator[str]:
        self.blocks.append(block)
        yield _event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _delta(self, delta: Object) -> str:
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _message(self, reason: str | None, stop: str | None, usage: Object) -> Object:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        end = {"stop_reason": reason, "stop_sequence": stop, "usage": usage}
        return {**head, "content": [], **end}

    def _reason(self) -> tuple[str, str | None]:
        reason, stop = str(self._choice.whole.reason), self._choice.finish.stop
        if reason == "stop" and stop in self._stops:
            return "stop_sequence", stop
        return _REASONS[reason], None

    def _usage(self) -> Object:
        finish = self._choice.finish
        return {
            "input_tokens": finish.prompt_tokens - finish.kept_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": finish.kept_tokens,
            "output_tokens": finish.new_tokens,
        }


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)

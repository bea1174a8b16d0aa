"""OpenAI's /v1/responses: its requests as chats, and answers in its shape. None is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..marks import TEXT
from .blocks import BlockReply, functions_of, new_id, objects, text_of
from .engine import Prompt
from .errors import ApiError, unsupported, wrong
from .pictures import content_of
from .replies import Choice, Object, Reply, event
from .schema import Asked, Chat, StreamOptions

_TEXTS = ("input_text", "output_text", "text")


@dataclass(kw_only=True)
class Responses(Asked):
    names = {
        **{"messages": "input", "images": "input", "max_tokens": "max_output_tokens"},
        **{"response_format": "text", "reasoning_effort": "reasoning"},
    }
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    max_tool_calls: int | None = None  # calls of tools that a service would run itself

    def made(self) -> Chat:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        text, reasoning = self.text or {}, self.reasoning or {}
        if text.get("verbosity") not in (None, "medium"):
            raise unsupported("text", "a verbosity is not supported")
        format, effort = text.get("format"), reasoning.get("effort")
        if not (format is None or isinstance(format, dict)):
            raise wrong("text", "format must be an object")
        if not (effort is None or isinstance(effort, str)):
            raise wrong("reasoning", "effort must be a text")
        is_schema = format is not None and format.get("type") == "json_schema"
        return self.as_chat(
            messages=self._messages(),
            tools=functions_of(self.tools, "parameters"),
            tool_choice=choice,
            response_format={"type": "json_schema", "json_schema": format} if is_schema else format,
            reasoning_effort=effort,
        )

    def reply(self, model: str, given: Chat, prompts: list[Prompt], choices: list[Choice]) -> Reply:
        return ResponseReply(model, self, choices[0])

    def _messages(self) -> list[Object]:
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        found, system = list[Object](), [self.instructions] if self.instructions else []
        for item in objects(items, "input"):
            if not found and item.get("role") in ("system", "developer"):
                # Many templates take one of these, and as the first alone.
                system.append(text_of(item.get("content"), _TEXTS, "input"))
            else:
                _add(found, item)
        before = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        return [*before, *found]


def _add(messages: list[Object], item: Object) -> None:
    """Adds an item: thoughts, texts and calls of an assistant in a row are one message."""
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call_output":
        content = content_of(item.get("output"), _TEXTS, "input")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "message" and role != "assistant":
        content = content_of(item.get("content"), _TEXTS, "input")
        messages.append({"role": role, "content": content})
    elif kind in ("message", "function_call", "reasoning"):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        last = messages[-1]
        if kind == "message":
            last["content"] += text_of(item.get("content"), _TEXTS, "input")
        elif kind == "reasoning":
            last["reasoning_content"] = text_of(item.get("content"), ("reasoning_text",), "input")
        else:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(call)
    else:
        raise unsupported("input", f"items of type {str(kind)[:80]!r} are not supported")


class ResponseReply(BlockReply):
    """A Reply in the shape of OpenAI's responses. Each block is an item of the output."""

    def __init__(self, model: str, asked: Responses, choice: Choice) -> None:
        super().__init__(choice)
        self._number = -1  # number of the last event
        self._head = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": asked.reasoning or {},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
        }

    def first(self) -> Iterator[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def last(self) -> Iterator[str]:
        yield from self.closed()
        answer = self.whole()
        yield self._event(f"response.{answer['status']}", response=answer)

    def failed(self, error: ApiError) -> str:
        said = error.body()["error"]
        told = {"code": said["code"] or said["type"], "message": said["message"]}
        return self._event("response.failed", response=self._response("failed", error=told))

    def whole(self) -> Object:
        finish = self._choice.finish
        usage = {
            "input_tokens": finish.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finish.kept_tokens},
            "output_tokens": finish.new_tokens,
            "total_tokens": finish.prompt_tokens + finish.new_tokens,
        }
        if not self._choice.whole.thought:  # else nobody counted
            usage["output_tokens_details"] = {"reasoning_tokens": 0}
        if finish.reason == "length":
            why = {"reason": "max_output_tokens"}
            return self._response("incomplete", incomplete_details=why, usage=usage)
        return self._response("completed", usage=usage)

    def begin(self, kind: str) -> Iterator[str]:
        item: Object = {"id": new_id("rs"), "type": "reasoning", "summary": []}
        part: Object = {"type": "reasoning_text", "text": ""}
        if kind == TEXT:
            item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begun({**item, "status": "in_progress", "content": []})
        self.blocks[-1]["content"].append(part)
        yield self._of_part("response.content_part.added", part=part)

    def grow(self, kind: str, text: str) -> Iterator[str]:
        part = self.blocks[-1]["content"][0]
        part["text"] += text
        more: Object = {"delta": text} | ({"logprobs": []} if kind == TEXT else {})
        yield self._of_part(f"response.{part['type']}.delta", **more)

    def end(self, kind: str) -> Iterator[str]:
        part = self.blocks[-1]["content"][0]
        more: Object = {"text": part["text"]} | ({"logprobs": []} if kind == TEXT else {})
        yield self._of_part(f"response.{part['type']}.done", **more)
        yield self._of_part("response.content_part.done", part=part)
        yield from self._ended()

    def called(self, call: Object) -> Iterator[str]:
        arguments = call["function"]["arguments"]
        item = {"id": new_id("fc"), "type": "function_call", "call_id": call["id"]}
        name = call["function"]["name"]
        yield from self._begun({**item, "name": name, "arguments": "", "status": "in_progress"})
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)
        yield self._of_item("response.function_call_arguments.done", arguments=arguments, name=name)
        self.blocks[-1]["arguments"] = arguments
        yield from self._ended()

    def _begun(self, item: Object) -> Iterator[str]:
        self.blocks.append(item)
        index = len(self.blocks) - 1
        yield self._event("response.output_item.added", output_index=index, item=item)

    def _ended(self) -> Iterator[str]:
        item, index = self.blocks[-1], len(self.blocks) - 1
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _of_item(self, kind: str, **fields: Any) -> str:
        index = len(self.blocks) - 1
        return self._event(kind, item_id=self.blocks[-1]["id"], output_index=index, **fields)

    def _of_part(self, kind: str, **fields: Any) -> str:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _response(self, status: str, **fields: Any) -> Object:
        rest = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, "status": status, "output": self.blocks, **rest, **fields}

"""What a request is to be answered from: text and tokens."""

from __future__ import annotations

import json
import threading
from typing import Any

from ..chat.session import context_of
from ..chat.template import Template
from .errors import ApiError
from .forms import Form, Forms
from .schema import Chat, Completion, Wanted
from .tokens import Tokens

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """Of one model. The chat template runs in its own process; one request at a time uses it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        template: Template,
        context: int | None,
        most: int | None,
        tokens: Tokens | None = None,
        forms: Forms | None = None,
    ) -> None:
        """context: tokens of prompt and answer, None: the model's. most: new tokens. tokens: those
        of the same model that others read texts with. forms: None: answers have any."""
        self._tokenizer, self._template = tokenizer, template
        self._tokens = tokens or Tokens(model, tokenizer)
        own = context_of(model)
        self._context = min(context, own) if context and own else context or own
        self._most = most
        self._forms = forms
        self._lock = threading.Lock()

    def form(self, wanted: Wanted | None, prompt: str, ids: list[int]) -> Form | None:
        """What keeps the answer to its form, if it has one. ApiError 400: it can have none."""
        if wanted is None:
            return None
        if self._forms is None:
            message = f"{wanted.field}: a server with --draft keeps no form"
            raise ApiError(400, message, wanted.field, "unsupported")
        return self._forms.of(wanted, prompt, len(ids))

    def of_chat(self, request: Chat) -> tuple[str, list[int]]:
        """ApiError 400: the messages are malformed, or the template refuses them."""
        messages = [_message(message) for message in request.messages]
        with self._lock:
            try:
                if not self._template.use(self._tokenizer, request.functions()):
                    message = "the model has no chat template; /v1/completions goes on with a text"
                    raise ApiError(400, message)
                text = self._template.render(messages, request.functions())
            except (ValueError, OSError) as error:
                raise ApiError(400, str(error), "messages") from None
        return text, self._ids(text, "messages", add_special_tokens=False)

    def of_completion(self, request: Completion) -> tuple[str, list[int]]:
        if isinstance(request.prompt, str):
            return request.prompt, self._ids(request.prompt, "prompt")
        return "", self._tokens.checked(request.prompt, "prompt")

    def room(self, ids: list[int], wanted: int | None, name: str) -> int:
        """How many tokens may follow. ApiError 400: none."""
        if not ids:
            raise ApiError(400, f"{name}: no tokens", name)
        limits = [limit for limit in (wanted, self._most) if limit is not None]
        if self._context is not None:
            if len(ids) >= self._context:
                message = (
                    f"{name}: {len(ids)} tokens; the context has {self._context}, the answer's "
                    "included"
                )
                raise ApiError(400, message, name, "context_length_exceeded")
            limits.append(self._context - len(ids))
        return min(limits) if limits else 1 << 30

    def _ids(self, text: str, name: str, **options: Any) -> list[int]:
        return self._tokens.of(text, name, self._context, **options)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: content is a text, arguments of calls are objects."""
    role = given.get("role")
    if role not in _ROLES:
        message = f"messages: role {role!r}; must be one of {', '.join(_ROLES)}"
        raise ApiError(400, message, "messages")
    found = {key: value for key, value in given.items() if value is not None}
    found["role"] = "system" if role == "developer" else role
    found["content"] = _text(given.get("content"))
    if "tool_calls" in found:
        found["tool_calls"] = _calls(found["tool_calls"])
    return found


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    message = "messages: content must be a text, or a list of parts of type text"
    raise ApiError(400, message, "messages")


def _calls(calls: Any) -> list[dict[str, Any]]:
    found = []
    try:
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
            found.append(call | {"function": function})
    except (ValueError, TypeError, KeyError, RecursionError):
        message = "messages: tool_calls must be a list of calls whose arguments are JSON"
        raise ApiError(400, message, "messages") from None
    return found

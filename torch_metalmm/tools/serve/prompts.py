"""The prompt that a request is answered from: text and tokens."""

from __future__ import annotations

import json
import threading
from typing import Any

from ..chat.template import Template
from ..marks import CALL, MARKS, opened_by
from ..sequence import context_of, room_behind
from ..writing import hidden_tokens
from .calling import Wanted
from .engine import Prompt
from .errors import ApiError, too_long, unsupported, wrong
from .forms import Form, Forms
from .pictures import content_of, taken_out
from .schema import Chat, Completion, Generation
from .sight import Sight
from .tokens import Tokens
from .weights import Bias

# The tokens before a text, before what follows its gap, and before what fills it: of StarCoder,
# Granite; Qwen, CodeGemma; DeepSeek.
_GAPS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
_DEFAULT_NEW = 16  # tokens of completions: OpenAI's
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """The prompts of one model. A process runs its chat template, for one request at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        template: Template,
        context: int | None,
        most: int | None,
        tokens: Tokens | None = None,
        forms: Forms | None = None,
        sight: Sight | None = None,
    ) -> None:
        """context: tokens of prompt and answer, None: the model's. most: new tokens. tokens: those
        of the same model that others read texts with. forms: None: answers have any. sight: what
        reads images, None: nothing does."""
        self._tokenizer, self._template = tokenizer, template
        self.tokens = tokens or Tokens(model, tokenizer)
        self._kind, self._most = str(model.config.model_type), most
        self._context = context_of(model, context)
        self._hidden = hidden_tokens(tokenizer)
        self._forms = forms
        self._sight = Sight(None, "the server reads none") if sight is None else sight
        self._lock = threading.Lock()

    def facts(self) -> dict[str, Any]:
        """The model's abilities, as Ollama tells them."""
        template = str(self._tokenizer.chat_template or "")
        signs = {
            "completion": True,
            "tools": "tools" in template,
            "thinking": "enable_thinking" in template,
            "vision": bool(self._sight),
            "insert": self._gap() is not None,
        }
        info = {"general.architecture": self._kind, f"{self._kind}.context_length": self._context}
        capabilities = [name for name, is_there in signs.items() if is_there]
        return {"capabilities": capabilities, "model_info": info, "template": template}

    def form(self, wanted: Wanted | None, prompt: str, ids: list[int]) -> Form | None:
        """The Form that the answer keeps, if it has one. ApiError 400: it can have none."""
        if wanted is None:
            return None
        if self._forms is None:
            raise unsupported(wanted.field, "answers of this --draft keep no form")
        return self._forms.of(wanted, prompt, len(ids))

    def of(self, request: Chat | Completion) -> list[Prompt]:
        """ApiError 400: as of_chat() and of_completion()."""
        return [self.of_chat(request)] if isinstance(request, Chat) else self.of_completion(request)

    def of_chat(self, request: Chat) -> Prompt:
        """ApiError 400: the messages are malformed, or the template refuses them."""
        messages, urls = taken_out([_message(message) for message in request.messages])
        self._sight.check(urls)
        calls = request.calls
        with self._lock:
            try:
                if not self._template.use(self._tokenizer, calls.tools):
                    message = "the model has no chat template; /v1/completions goes on with a text"
                    raise ApiError(400, message)
                text = self._template.render(messages, calls.tools, request.variables())
                if calls.is_forced and opened_by(text) is None:
                    text += self._call_mark()
            except (ValueError, OSError) as error:
                raise ApiError(400, str(error), "messages") from None
        ids = self._ids(text, "messages", add_special_tokens=False)
        inputs: dict[str, Any] = {}
        if urls:
            inputs = self._sight.read(text, urls)
            ids = self.tokens.checked(inputs["input_ids"][0].tolist(), "messages")
        return Prompt(text, ids, self._room(ids, request.most(), "messages"), inputs)

    def of_completion(self, request: Completion) -> list[Prompt]:
        found = []
        for given in request.prompt:
            if isinstance(given, str):
                ids = self._ids(self._with_gap(given, request.suffix or ""), "prompt")
            else:
                ids = self.tokens.checked(given, "prompt")
                given = self._tokenizer.decode(ids) if request.echo else ""
            room = self._room(ids, request.max_tokens or _DEFAULT_NEW, "prompt")
            found.append(Prompt(given, ids, room))
        return found

    def _call_mark(self) -> str:
        """The text that the model writes before a call, if its template says so."""
        for mark in MARKS:
            if mark.kind == CALL and mark.opens in self._template.text:
                return mark.opens + ("\n" if mark.closes else "")
        return ""

    def _with_gap(self, text: str, suffix: str) -> str:
        """ApiError 400: the model knows no texts with a gap."""
        if not suffix:
            return text
        if (found := self._gap()) is None:
            raise unsupported("suffix", "the model fills no gaps in texts")
        before, after, gap = found
        return before + text + after + suffix + gap

    def _gap(self) -> tuple[str, str, str] | None:
        """The first of _GAPS whose words are in the vocabulary."""
        words = {token.content for token in self._tokenizer.added_tokens_decoder.values()}
        return next((gap for gap in _GAPS if words >= {*gap}), None)

    def spelled(self, token: int) -> str:
        """The text that the token adds to an answer; "" where it is hidden, as the end is."""
        return "" if token in self._hidden else self.tokens.spelled(token)

    def bias(self, request: Generation, count: int) -> Bias | None:
        """None: the request changes no logits. count: tokens of the prompt. ApiError 400: it does
        so for a token that the model has not."""
        biases = request.biases()
        self.tokens.checked([*biases], "logit_bias")
        penalties = request.frequency_penalty or 0.0, request.presence_penalty or 0.0
        return Bias(count, biases, *penalties) if biases or any(penalties) else None

    def _room(self, ids: list[int], wanted: int | None, name: str) -> int:
        """How many tokens may follow. ApiError 400: none."""
        if not ids:
            raise wrong(name, "no tokens")
        most = min((n for n in (wanted, self._most) if n is not None), default=None)
        try:
            return room_behind(name, len(ids), self._context, most)
        except ValueError as error:
            raise too_long(name, str(error).partition(": ")[2]) from None

    def _ids(self, text: str, name: str, **options: Any) -> list[int]:
        return self.tokens.of(text, name, self._context, **options)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: content is a text, arguments of calls are objects."""
    role = given.get("role")
    if role not in _ROLES:
        raise wrong("messages", f"role {role!r}; must be one of {', '.join(_ROLES)}")
    found = {key: value for key, value in given.items() if value is not None}
    found["role"] = "system" if role == "developer" else role
    found["content"] = content_of(given.get("content"), (), "messages")
    if "tool_calls" in found:
        found["tool_calls"] = _calls(found["tool_calls"])
    return found


def _calls(calls: Any) -> list[dict[str, Any]]:
    found = []
    try:
        for call in calls:
            function = dict(call["function"])
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
            found.append(call | {"function": function})
    except (ValueError, TypeError, KeyError, RecursionError):
        raise wrong(
            "messages", "tool_calls must be a list of calls whose arguments are JSON"
        ) from None
    return found

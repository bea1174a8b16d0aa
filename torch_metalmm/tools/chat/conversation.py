"""The messages of a chat, and what a session is given of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..marks import CALL, assistant_message, calls_of, parts
from ..writing import Writing
from .session import Message, Session


class Conversation:
    """A chat with a session. Messages that no longer fit the context are kept, but not answered."""

    def __init__(
        self,
        session: Session,
        name: str,
        system: str | None = None,
        tools: list[Message] | None = None,
    ) -> None:
        """name: of the model. tools: the functions that it may ask to call."""
        self.session, self.name, self.system, self.tools = session, name, system, tools
        self.messages: list[Message] = []  # without the system's
        self.hidden = 0  # how many of the first the model no longer sees

    def everything(self) -> list[Message]:
        return [*self._system(), *self.messages]

    def set(self, messages: list[Message]) -> None:
        """Be the chat of these messages; a system message among them becomes that of the chat."""
        if messages and messages[0]["role"] == "system":
            self.system = messages[0]["content"]
            messages = messages[1:]
        self.messages, self.hidden = messages, 0

    def ask(self, message: Message, show: Callable[[str], object]) -> Writing:
        """Add the message and its answer, in part if it was stopped.

        The chat stays as it was where an error is raised, or nothing came before the stop.
        ValueError: as Session.answer.
        """
        before, hidden = list(self.messages), self.hidden
        self.messages.append(message)
        stopped = threading.Event()
        try:
            with _interrupts(stopped.set):
                self._fit()
                answer = self.session.answer(self._seen(), show, self.tools, stopped.is_set)
        except BaseException:
            self.messages, self.hidden = before, hidden
            raise
        if answer.result.reason == "interrupted" and not answer.text:
            self.messages, self.hidden = before, hidden
            return answer
        takes_calls = "tool_calls" in (self.session.template.text if self.session.template else "")
        self.messages.append(
            assistant_message(answer.text, takes_calls, self.session.prompt, len(self.messages))
        )
        return answer

    def awaited(self) -> list[str]:
        """The functions that the last answer asks to call and that have no result yet."""
        return [result["name"] for result in self._awaited()]

    def result(self, text: str) -> Message:
        """The message of what the first function awaited gave."""
        return {"role": "tool", **self._awaited()[0], "content": text}

    def _awaited(self) -> list[Message]:
        """Whose results the messages of awaited functions are: name, tool_call_id."""
        for results, message in enumerate(reversed(self.messages)):
            if message["role"] != "tool":
                return _calls(message)[results:]
        return []

    def _system(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _seen(self) -> list[Message]:
        return [*self._system(), *self.messages[self.hidden :]]

    def _fit(self) -> None:
        """Hide the first turns where the context has no room: half of it is free then.

        A turn less would do, for one answer: each time the whole chat is read anew.
        """
        context = self.session.context
        if context is None:
            return
        reserve = min(self.session.options.max_new_tokens or context, context // 4)
        if self._count() <= context - reserve:
            return
        turns = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        for turn in turns:
            if turn > self.hidden:
                self.hidden = turn
                if self._count() <= context // 2:
                    return

    def _count(self) -> int:
        return len(self.session.prompt_of(self._seen(), self.tools)[1])


def _calls(message: Message) -> list[Message]:
    """The calls that the message asks for: the name of each, and its id where it has one."""
    if message["role"] != "assistant":
        return []
    if message.get("tool_calls"):
        return [
            {"name": call["function"]["name"]}
            | ({"tool_call_id": call["id"]} if "id" in call else {})
            for call in message["tool_calls"]
        ]
    texts = [text for kind, text in parts(message["content"]) if kind == CALL]
    return [{"name": call["name"]} for text in texts for call in calls_of(text) or []]


@contextmanager
def keeps_on() -> Iterator[None]:
    """Ctrl-C ends nothing; on a terminal that reads keys it is a key."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls stop(), another raises KeyboardInterrupt."""

    def handle(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""The thread that has the model, and the requests that wait for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ..chat.session import Options
from .errors import ApiError

_LOG = logging.getLogger(__name__)


class Finish(NamedTuple):
    """The end of an answer, and what it took."""

    reason: str  # stop or length
    prompt_tokens: int
    kept_tokens: int  # of the prompt, read for an earlier answer
    new_tokens: int


@dataclass(eq=False)
class Job:
    """A prompt to go on from."""

    prompt: str
    ids: list[int]
    options: Options  # with max_new_tokens
    seed: int | None
    tell: Callable[[str | Finish | Exception], None]  # called on the engine's thread
    is_cancelled: bool = False


@dataclass(eq=False)
class Task:
    """Anything else that is to be done with the model."""

    work: Callable[[], Any]
    tell: Callable[[Any], None]  # gets the result, or the exception
    is_cancelled: bool = False


class Runner(Protocol):
    """How answers are computed. All but stop() is called on the engine's thread."""

    def room(self) -> int: ...  # how many more jobs it takes
    def is_busy(self) -> bool: ...
    def take(self, job: Job) -> None: ...
    def step(self) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def stop(self, job: Job) -> None: ...


@dataclass
class Engine:
    """Gives requests to a runner in the order they come; at most `queue` of them wait."""

    runner: Runner
    queue: int
    _waiting: deque[Job | Task] = field(default_factory=deque)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="metalmm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Finish the step that is under way, and nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def submit(self, request: Job | Task) -> None:
        """ApiError 429: as many requests wait as may; 503: the server ends."""
        with self._changed:
            if self._is_closed:
                raise ApiError(503, "the server is shutting down", retry_after=10)
            # Those that wait for a step to end, and not for a place, are not counted.
            if len(self._waiting) >= self.queue + self.runner.room():
                raise ApiError(
                    429, f"{self.queue} requests are waiting already", code="queue", retry_after=1
                )
            self._waiting.append(request)
            self._changed.notify()

    def cancel(self, request: Job | Task) -> None:
        """Let nothing more be computed for it; from any thread, also when it is over."""
        with self._changed:
            request.is_cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)
        if isinstance(request, Job):
            self.runner.stop(request)

    def load(self) -> tuple[int, bool]:
        """(how many requests wait, whether one is being answered)."""
        return len(self._waiting), self.runner.is_busy()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._admit():
                try:
                    if self.runner.is_busy():
                        self.runner.step()
                except Exception as error:  # of one step: the server goes on
                    _LOG.error("a step failed", exc_info=error)
                    self.runner.fail(error)

    def _admit(self) -> bool:
        """Take what there is room for; wait where there is nothing to do. False: closed."""
        while True:
            with self._changed:
                while not (self._waiting or self.runner.is_busy() or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    self.runner.fail(ApiError(503, "the server is shutting down"))
                    return False
                request = self._waiting[0] if self._waiting else None
                if request is None or (isinstance(request, Job) and not self.runner.room()):
                    return True
                self._waiting.popleft()
                if isinstance(request, Job):
                    self.runner.take(request)
                    continue
            try:
                request.tell(request.work())
            except Exception as error:
                request.tell(error)

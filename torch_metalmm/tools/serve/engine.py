"""The thread that has the model, and the requests that wait for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from ..writing import Finish, Options
from .errors import ApiError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Prompt(NamedTuple):
    """The text that an answer goes on from."""

    text: str
    ids: list[int]
    room: int  # tokens that may follow
    inputs: Mapping[str, Any] = MappingProxyType({})  # images, as Job has them


@dataclass(eq=False)
class Job:
    """A prompt to go on from."""

    prompt: str
    ids: list[int]
    options: Options  # with max_new_tokens
    seed: int | None
    tell: Callable[[str | Finish | Exception], None]  # called on the engine's thread
    owner: bytes = b""  # whose prompts it may have a beginning in common with
    # A prompt with images as arguments of generate(), input_ids and more.
    inputs: Mapping[str, Any] = field(default_factory=dict)
    is_cancelled: bool = False


@dataclass(eq=False)
class Task:
    """Anything else that is to be done with the model, in parts: one between two steps."""

    work: Generator[None, None, Any]
    tell: Callable[[Any], None]  # gets what the work returns, or the exception
    is_cancelled: bool = False


class Runner(Protocol):
    """How answers are computed, on the engine's thread. A step looks which jobs are cancelled."""

    def room(self) -> int: ...  # how many more jobs it takes

    def takes(self, job: Job) -> bool:
        """Whether there is room for this one."""
        return self.room() > 0

    def is_busy(self) -> bool: ...
    def take(self, job: Job) -> None: ...
    def step(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Worker:
    """A thread that calls functions one after the other, and ends with the process.

    A server loads its model and computes answers in the same one: where two threads have used
    OpenMP, GNU's holds more threads than there are cores, and lets them sleep between the ops of a
    token (SmolLM2, two cores: 67 tokens/s in place of 126).
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """The future result or error of the function, which runs on the worker's thread."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del future, function  # their memory is not kept until the next call


@dataclass
class Engine:
    """Gives requests to a runner in the order they come; at most `queue` of them wait."""

    runner: Runner
    queue: int
    worker: Worker = field(default_factory=lambda: Worker("metalmm-engine"))
    _waiting: deque[Job | Task] = field(default_factory=deque)
    _task: Task | None = None  # under way
    _reserved: int = 0  # places of the queue for requests that are being prepared
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def start(self) -> None:
        self._over = self.worker.call(self._run)

    def close(self) -> None:
        """Finish the step, or part of a task, that is under way, and nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._over.result()

    def reserve(self) -> None:
        """Keep a place of the queue. ApiError 429: as many requests wait as may; 503: it ends."""
        with self._changed:
            self._check_open()
            # Requests that wait for a step to end, and not for a place, are not counted.
            if len(self._waiting) + self._reserved >= self.queue + self.runner.room():
                raise ApiError(
                    429, f"{self.queue} requests are waiting already", code="queue", retry_after=1
                )
            self._reserved += 1

    def release(self) -> None:
        """Give the place up that reserve() kept."""
        with self._changed:
            self._reserved -= 1

    def submit(self, request: Job | Task) -> None:
        """In the place that reserve() kept. ApiError 503: the server ends."""
        with self._changed:
            self._check_open()
            self._reserved -= 1
            self._waiting.append(request)
            self._changed.notify()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", retry_after=10)

    def cancel(self, request: Job | Task) -> None:
        """Let nothing more be computed for it; from any thread, also when it is over."""
        with self._changed:
            request.is_cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)

    def load(self) -> tuple[int, bool]:
        """(how many requests wait, whether one is being answered)."""
        with self._changed:  # a request on its way from the one to the other is in neither
            return len(self._waiting), self._is_busy()

    def _is_busy(self) -> bool:
        return self._task is not None or self.runner.is_busy()

    def _run(self) -> None:
        with torch.inference_mode():
            while self._admit():
                if self._task is not None:
                    self._go_on(self._task)
                try:
                    if self.runner.is_busy():
                        self.runner.step()
                except Exception as error:  # an error of one step: the server goes on
                    _LOG.error("a step failed", exc_info=error)
                    self.runner.fail(error)

    def _go_on(self, task: Task) -> None:
        """Do a part of the task."""
        try:
            if not task.is_cancelled:
                next(task.work)
                return
        except StopIteration as end:
            task.tell(end.value)
        except Exception as error:
            _LOG.error("a task failed", exc_info=error)
            task.tell(error)
        task.work.close()
        self._task = None

    def _admit(self) -> bool:
        """Take what there is room for; wait where there is nothing to do. False: closed."""
        with self._changed:
            while not (self._waiting or self._is_busy() or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                error = ApiError(503, "the server is shutting down")
                self.runner.fail(error)
                for told in [*self._waiting, *([self._task] if self._task else [])]:
                    told.tell(error)
                self._waiting.clear()
                return False
            while (request := self._next()) is not None:
                self._waiting.remove(request)
                if isinstance(request, Task):
                    self._task = request
                    continue
                try:
                    self.runner.take(request)
                except Exception as error:
                    _LOG.error("a request was not taken", exc_info=error)
                    request.tell(error)
            return True

    def _next(self) -> Job | Task | None:
        """The first that waits and has a place: a job in the runner, one task beside the jobs."""
        for request in self._waiting:
            if self._task is None if isinstance(request, Task) else self.runner.takes(request):
                return request
        return None


class Stopped(Exception):
    """Nobody waits for what is computed."""


def _outer_stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The lists of modules that are in no other list."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outer_stacks(child)


@contextmanager
def stoppable(model: nn.Module, is_over: Callable[[], bool]) -> Iterator[None]:
    """Look before each layer of the model's stacks whether it is over. Stopped: it is.

    A forward of a long text takes minutes, whose client may be gone. A stack within a layer, of
    experts for one, has no hooks: with some the layer would not be fused.
    """

    def look(*_: Any) -> None:
        if is_over():
            raise Stopped

    layers = (layer for stack in _outer_stacks(model) for layer in stack)
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

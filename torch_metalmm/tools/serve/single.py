"""One answer at a time, by a session of `metalmm chat`: where answers cannot share steps."""

from __future__ import annotations

import threading

import torch

from ..chat.session import Session
from .engine import Finish, Job, Runner, Stopped, stoppable


class Single(Runner):
    """A runner. The session's cache stays, with what the next prompt may begin with."""

    def __init__(self, session: Session | None) -> None:
        """None: the model generates nothing, and no job comes."""
        self._session = session
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._owner = b""  # owner of the text that the session has kept

    def room(self) -> int:
        return int(self._job is None)

    def is_busy(self) -> bool:
        return self._job is not None

    def take(self, job: Job) -> None:
        self._job = job

    def step(self) -> None:
        job, session = self._job, self._session
        assert job is not None and session is not None
        with self._lock:  # a stop() from here on is of this job
            session.resume()
            if job.is_cancelled:
                session.stop()
        if job.owner != self._owner:
            session.forget()
            self._owner = job.owner
        session.options = job.options
        if job.seed is None:
            torch.seed()
        else:
            torch.manual_seed(job.seed)
        pace = session.pace
        drafted, right = pace.drafted, pace.accepted
        try:  # a prompt of a longrope may have a part of thousands of tokens
            with stoppable(session.model, lambda: job.is_cancelled):
                answer = session.go_on(job.prompt, job.ids, job.tell)
        except Stopped:
            answer = None
        with self._lock:
            self._job = None
        if answer is None:
            return
        counts = len(job.ids), answer.kept_tokens, answer.new_tokens
        right = pace.accepted - right
        job.tell(Finish(answer.finish, *counts, right, pace.drafted - drafted - right))

    def fail(self, error: Exception) -> None:
        with self._lock:
            job, self._job = self._job, None
        if job is not None:
            job.tell(error)

    def stop(self, job: Job) -> None:
        with self._lock:
            if self._job is job and self._session is not None:
                self._session.stop()

"""One answer at a time, by a session of `metalmm chat`: where answers cannot share steps."""

from __future__ import annotations

import torch

from ..chat.session import Session
from .engine import Job, Runner, Stopped, stoppable


class Single(Runner):
    """A runner. The session's cache stays, with what the next prompt may begin with."""

    def __init__(self, session: Session | None) -> None:
        """None: the model generates nothing, and no job comes."""
        self._session = session
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
        if job.owner != self._owner:
            session.forget()
            self._owner = job.owner
        session.options = job.options
        if job.seed is None:
            torch.seed()
        else:
            torch.manual_seed(job.seed)

        def is_over() -> bool:
            return job.is_cancelled

        try:  # a prompt of a longrope may have a part of thousands of tokens
            with stoppable(session.model, is_over):
                finish = session.go_on(job.prompt, job.ids, job.tell, is_over).result
        except Stopped:
            finish = None
        self._job = None
        if finish is not None:
            job.tell(finish)

    def fail(self, error: Exception) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.tell(error)

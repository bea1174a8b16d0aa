"""Jobs answered by the steps of a Batch, without a server."""

from __future__ import annotations

from typing import Any

import torch

from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.engine import Job


def answered(batch: Batch, jobs: list[Job]) -> dict[int, list[torch.Tensor]]:
    """The logits of each job's tokens; each is taken when there is room."""
    waiting, found, choose = (
        list(jobs),
        {id(job): list[torch.Tensor]() for job in jobs},
        batch._goes_on,
    )

    def noted(answer: Any, logits: torch.Tensor, guess: int | None = None) -> bool:
        found[id(answer.job)].append(logits)
        return choose(answer, logits, guess)

    batch._goes_on = noted  # type: ignore[method-assign]
    with torch.inference_mode():
        while waiting or batch.is_busy():
            if waiting and batch.room():
                batch.take(waiting.pop(0))
            batch.step()
    batch._goes_on = choose  # type: ignore[method-assign]
    assert batch.cache.pages.available == batch.cache.pages.count
    return found

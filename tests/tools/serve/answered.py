"""Jobs answered by the steps of a runner, without a server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from gguf_files import random_model

from torch_metalmm import fuse_, load_gguf
from torch_metalmm.hf.caches.pages import Pages
from torch_metalmm.tools.serve.batch import Batch
from torch_metalmm.tools.serve.engine import Job
from torch_metalmm.tools.serve.guessing import Guessing
from torch_metalmm.tools.writing import Finish, Options


def endless(name: str, folder: Path) -> tuple[Any, Any]:
    """A random model, "llama" or "llama fused", whose answers no token ends; and its tokenizer."""
    kind, *fused = name.split()
    model, tokenizer = load_gguf(random_model(folder / "m.gguf", kind))
    model.generation_config.eos_token_id = None
    return (fuse_(model) if fused else model), tokenizer


def pool(
    loaded: Any, most: int, pages: int, guessing: Guessing | None = None, format: str = "q8_0"
) -> Batch:
    """A runner whose cache has so many pages, and room for states."""
    found = Batch(*loaded, 1, format, 1 << 24).cache
    if not found.states:
        return Batch(*loaded, most, format, pages * found.page_bytes, guessing)
    batch = Batch(*loaded, most, format, 1 << 25, guessing)
    assert batch.cache.pages.count > pages and batch.cache.states.most_kept > 3
    batch.cache.pages = Pages(pages)
    return batch


class Asked(Job):
    """A job of these tokens, what it is told, and the logits of its answer's tokens."""

    def __init__(
        self, ids: list[int], new: int, seed: int | None = None, owner: bytes = b"", **options: Any
    ) -> None:
        self.told, self.logits = list[Any](), list[torch.Tensor]()
        self.ended = threading.Event()
        options = {"max_new_tokens": new} | options
        super().__init__("", ids, Options(**options), seed, self.hear, owner)

    def hear(self, what: Any) -> None:
        self.told.append(what)
        if isinstance(what, Finish | Exception):
            self.ended.set()

    @property
    def texts(self) -> list[str]:
        return [what for what in self.told if isinstance(what, str)]

    @property
    def finish(self) -> Finish:
        assert isinstance(self.told[-1], Finish), self.told[-1]
        return self.told[-1]


def run(runner: Any, *jobs: Job) -> None:
    """Until all are answered; each is taken when there is room."""
    waiting = [*jobs]
    with torch.inference_mode():
        while waiting or runner.is_busy():
            while waiting and runner.room():
                runner.take(waiting.pop(0))
            runner.step()


def answered(batch: Batch, *jobs: Asked) -> None:
    """run(), which notes the logits of each job's tokens, and gives all pages back."""
    choose = batch._goes_on

    def noted(answer: Any, logits: torch.Tensor, guess: int | None = None) -> bool:
        answer.job.logits.append(logits)
        return choose(answer, logits, guess)

    batch._goes_on = noted  # type: ignore[method-assign]
    run(batch, *jobs)
    batch._goes_on = choose  # type: ignore[method-assign]
    assert batch.cache.pages.available == batch.cache.pages.count

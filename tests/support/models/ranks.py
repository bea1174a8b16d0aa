"""Several processes that speak by gloo, each a rank of a mesh, for calls of functions.

They are forked from a server that has imported torch, transformers and the package and has
computed nothing; on a Mac, where a forked process may not use Apple's frameworks, each starts anew.
They serve every call of as many ranks until one of them fails: what a function changes in a module,
it puts back.

    @on_each_rank(2)
    def test_something(mesh: Any, tmp_path: Path) -> None:

is called there, with its mesh and the arguments that pytest has for it here.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

SECONDS = 120  # of one call; a rank that waits for ever ends the test
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "torch_metalmm.hf.quantizer",
]


class RankError(AssertionError):
    """What the ranks raised, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


class _Ranks:
    def __init__(self, count: int) -> None:
        context = mp.get_context("spawn" if sys.platform == "darwin" else "forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(count):
            pipe, end = context.Pipe()
            process = context.Process(target=_rank, args=(end, store, count, rank), daemon=True)
            process.start()
            end.close()  # so that the pipe ends with the process
            self._processes.append(process)
            self._pipes.append(pipe)

    def call(self, function: Callable[..., Any], args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, bytes] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + SECONDS
        left = dict(enumerate(self._pipes))
        while left:
            ready = wait(list(left.values()), timeout=end - time.monotonic())
            if not ready:
                errors |= dict.fromkeys(left, f"no answer in {SECONDS} s")
                break
            for rank, pipe in list(left.items()):
                if pipe not in ready:
                    continue
                del left[rank]
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join()
                    error = f"ended with {self._processes[rank].exitcode}"
                if error:
                    errors[rank] = error
        if errors:
            raise RankError(errors)
        return [pickle.loads(result) for _, result in sorted(results.items())]

    def end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()


_ranks: dict[int, _Ranks] = {}


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[function(mesh, *args) of each rank]. RankError: one raised, ended or took too long."""
    if count not in _ranks:
        _ranks[count] = _Ranks(count)
    try:
        return _ranks[count].call(function, args)
    except BaseException:
        _ranks.pop(count).end()
        raise


def on_each_rank(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs on each of so many ranks."""

    def of(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def test(**given: Any) -> None:
            on_ranks(count, test, given)

        own = inspect.signature(function)
        _, *given = own.parameters.values()
        test.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
        return test

    return of


def _call(function: Any, mesh: Any, args: Any) -> Any:
    """A test is sent by its name, which is that of what calls it on all ranks."""
    if hasattr(function, "__wrapped__"):
        return function.__wrapped__(mesh, **args[0])
    return function(mesh, *args)


def _rank(calls: Any, store: str, count: int, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    file = dist.FileStore(store, count)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    while True:
        try:
            function, args = calls.recv()
        except EOFError:
            os._exit(0)  # without waiting for ranks that ended
        try:
            # As bytes: a tensor would be shared by a file that ends with this process.
            calls.send((None, pickle.dumps(_call(function, mesh, args))))
        except BaseException:
            calls.send((traceback.format_exc(), b""))
            os._exit(0)  # others do not wait for it in a collective

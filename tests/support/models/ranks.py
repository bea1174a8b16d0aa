"""Several processes that speak by gloo, each a rank of a mesh, for one call of a function.

A process is forked from a server that has imported torch, transformers and the package and has
computed nothing, so that a rank begins in a tenth of a second; on a Mac, where a forked process may
not use Apple's frameworks, each starts anew.
"""

from __future__ import annotations

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
_PRELOADED = ["torch", "transformers", "torch_metalmm", "torch_metalmm.hf.quantizer"]


class RankError(AssertionError):
    """What the ranks raised, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[function(mesh, *args) of each rank]. RankError: one raised, ended or took too long."""
    context = mp.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ranks, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        for rank in range(count):
            pipe, end = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(end, store, count, rank, function, args))
            process.start()
            end.close()  # so that the pipe ends with the process
            ranks.append(process)
            pipes.append(pipe)
        try:
            results, errors = _answers(pipes, ranks)
        finally:
            for process, pipe in zip(ranks, pipes, strict=True):
                process.kill()
                process.join()
                pipe.close()
    if errors:
        raise RankError(errors)
    return [pickle.loads(results[r]) for r in range(count)]


def _answers(pipes: list[Any], ranks: list[Any]) -> tuple[dict[int, bytes], dict[int, str]]:
    results: dict[int, bytes] = {}
    errors: dict[int, str] = {}
    end = time.monotonic() + SECONDS
    left = dict(enumerate(pipes))
    while left:
        ready = wait(list(left.values()), timeout=end - time.monotonic())
        if not ready:
            errors |= dict.fromkeys(left, f"no answer in {SECONDS} s")
            return results, errors
        for rank, pipe in list(left.items()):
            if pipe not in ready:
                continue
            del left[rank]
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                ranks[rank].join()
                error = f"ended with {ranks[rank].exitcode}"
            if error:
                errors[rank] = error
    return results, errors


def _rank(
    answer: Any, store: str, count: int, rank: int, function: Callable[..., Any], args: Any
) -> None:
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        file = dist.FileStore(store, count)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=count)
        mesh = init_device_mesh("cpu", (count,))
        result = function(mesh, *args)
        # As bytes: a tensor would be shared by a file that ends with this process.
        answer.send((None, pickle.dumps(result)))
    except BaseException:
        answer.send((traceback.format_exc(), b""))
    os._exit(0)  # without waiting for ranks that ended

"""Several processes that speak by gloo, each a rank of a mesh, for one call of a function.

A process is forked from a server that has imported torch, transformers and the package and has
computed nothing, so that a rank begins in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
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
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank, args=(answers, store, count, r, function, args))
            for r in range(count)
        ]
        for process in ranks:
            process.start()
        try:
            results, errors = _answers(answers, ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    if errors:
        raise RankError(errors)
    return [pickle.loads(results[r]) for r in range(count)]


def _answers(answers: Any, ranks: list[Any]) -> tuple[dict[int, Any], dict[int, str]]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    end = time.monotonic() + SECONDS
    while len(results) + len(errors) < len(ranks):
        try:
            rank, error, result = answers.get(timeout=0.2)
        except queue.Empty:
            for rank, process in enumerate(ranks):
                dead = process.exitcode is not None and answers.empty()
                if dead and rank not in results and rank not in errors:
                    errors[rank] = f"ended with {process.exitcode}"
                elif time.monotonic() > end and rank not in results:
                    errors.setdefault(rank, f"no answer in {SECONDS} s")
            continue
        if error is None:
            results[rank] = result
        else:
            errors[rank] = error
    return results, errors


def _rank(
    answers: Any, store: str, count: int, rank: int, function: Callable[..., Any], args: Any
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
        answers.put((rank, None, pickle.dumps(result)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
    answers.close()
    answers.join_thread()
    os._exit(0)  # without waiting for ranks that ended

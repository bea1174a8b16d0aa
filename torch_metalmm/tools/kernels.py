"""The Metal kernels of a model, compiled before its first answer waits for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from .. import _C
from ..models.cache_argument import cache_in, with_cache

# Tokens of a prompt: one for each size of a tile. A longer prompt takes the tiles of one of these;
# on M1 and M2 those of 2 to 15 tokens have kernels by their number, and wait for them.
LENGTHS = (1, 8, 16, 32, 48, 64)


def compile_kernels(model: nn.Module, progress: bool = True) -> int:
    """Compiles what a causal language model on MPS runs for prompts of 16 tokens and more and the
    token behind them, as many kernels at a time as the machine has cores; returns how many. Of a
    model on another device 0, and nothing is done.

    A forward of each of LENGTHS tokens tells which they are; nothing of it is computed by a kernel
    of this package. progress: a line on stderr. RuntimeError: a kernel does not compile.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return _compiled(model, device, progress) if device.type == "mps" else 0


def _compiled(model: nn.Module, device: torch.device, progress: bool) -> int:
    from tqdm import tqdm

    kernels = _collected(model, device)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(_C.compile_kernel, range(len(kernels)))
        what = {"desc": "compiling kernels", "total": len(kernels), "disable": not progress}
        for _ in tqdm(done, leave=False, **what):
            pass
    return len(kernels)


def _collected(model: Any, device: torch.device) -> list[str]:
    _C.collect_kernels()
    try:
        with torch.no_grad():
            for length in LENGTHS:
                ids = torch.zeros(1, length, dtype=torch.int64, device=device)
                cache = cache_in(model(input_ids=ids, use_cache=True))
                if cache is not None:
                    model(input_ids=ids[:, :1], use_cache=True, **with_cache(model, cache))
    finally:
        kernels = _C.collected_kernels()
    return list(kernels)

"""Random calls of the ops on experts that run a given kernel."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from inputs import packed_weight, uniform
from oracle import spec
from torch import Tensor

from torch_metalmm import _C

ops = torch.ops.metalmm
Run = Callable[[Callable[[Tensor], Tensor]], Tensor]


def expert_call(
    kernel: str, strategy: str, name: str, nk: tuple[int, int], dtype: torch.dtype,
    pick: random.Random,
) -> tuple[dict[str, Any], Run, tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """What is planned, the call, its activations and its W, as kernel_cases.Case has them."""
    n, k = nk
    experts, tokens, choices = pick.randint(1, 5), pick.randint(1, 9), pick.randint(1, 10)
    seed, is_up = (kernel, nk, experts, tokens, choices), strategy == "expert_up"
    packed = packed_weight(name, experts * n * (1 + is_up), k, seed)
    w = packed.view(experts, n * (1 + is_up), -1)
    x = uniform(dtype, tokens, k, seed=(seed, 0))
    bias = uniform(dtype, *w.shape[:2], seed=(seed, "bias"))
    scores = uniform(dtype, tokens, choices, seed=(seed, "scores"))
    ids = torch.tensor([[pick.randrange(experts) for _ in range(choices)] for _ in range(tokens)])
    op = {"gemv": "linear", "gemm": "tiles"}.get(strategy[7:], strategy[7:])
    problem: dict[str, Any] = {"op": f"expert_{op}", "n": n, "k": k, "format": name}
    sizes: dict[str, Any] = {"experts": experts, "sharing": choices}
    if strategy == "expert_gemm":
        rows = _C.expert_tile_rows(tokens * choices, experts)
        most = tokens * choices + min(tokens * choices, experts) * (rows - 1)
        problem |= {"m": most // rows * rows, "experts": sizes | {"tile_rows": rows}}
    elif strategy == "expert_down":
        sizes |= {"choices": choices, "float_scores": dtype == torch.float32}
        problem |= {"m": tokens, "experts": sizes, "bias": True}
    else:
        problem |= {"m": tokens * choices, "experts": sizes, "bias": True}
    limit, act = (
        pick.choice((None, 2.0)),
        pick.choice((*_C.activations(), "swiglu_oai")),
    )
    interleaved = pick.random() < 0.5

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        given = [put(t) for t in (x, w, ids, bias)]
        if is_up:
            out: Tensor = ops.expert_swiglu(
                *given, name, act, interleaved, limit=limit, strategy=strategy
            )
            return out
        down = put(scores) if strategy == "expert_down" else None
        out = ops.expert_linear(*given, name, down, strategy=strategy)
        return out

    return problem, run, (x, bias), (spec(name, packed, k),)

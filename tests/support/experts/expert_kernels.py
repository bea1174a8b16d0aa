"""Random calls of the ops on experts that run a given kernel."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from inputs import packed_weight, uniform
from oracle import spec
from recurrent_calls import Run
from torch import Tensor

from torch_metalmm import _C

ops = torch.ops.metalmm


def expert_call(
    kernel: str, strategy: str, name: str, nk: tuple[int, int], dtype: torch.dtype,
    pick: random.Random,
) -> tuple[Run, tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """The call, its activations and its W, as kernel_cases.Case has them."""
    n, k = nk
    experts, tokens, choices = pick.randint(1, 5), pick.randint(1, 9), pick.randint(1, 10)
    seed, is_up = (kernel, nk, experts, tokens, choices), strategy == "expert_up"
    packed = packed_weight(name, experts * n * (1 + is_up), k, seed)
    w = packed.view(experts, n * (1 + is_up), -1)
    x = uniform(dtype, tokens, k, seed=(seed, 0))
    bias = uniform(dtype, *w.shape[:2], seed=(seed, "bias"))
    scores = uniform(dtype, tokens, choices, seed=(seed, "scores"))
    ids = torch.tensor([[pick.randrange(experts) for _ in range(choices)] for _ in range(tokens)])
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

    return run, (x, bias), (spec(name, packed, k),)

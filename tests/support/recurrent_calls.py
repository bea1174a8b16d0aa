"""Random calls of the recurrent ops that run a given kernel."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from inputs import uniform
from torch import Tensor

ops = torch.ops.metalmm
Run = Callable[[Callable[[Tensor], Tensor]], Tensor]
Made = tuple[Run, tuple[Tensor, ...]]  # the call and its activations, as kernel_cases.Case has them


def conv(kernel: str, dtype: torch.dtype, pick: random.Random) -> Made:
    """y and the state."""
    batch, positions, n, taps = (pick.randint(1, most) for most in (3, 70, 150, 8))
    width, seed = taps - 1 + pick.randint(0, 5), (kernel, batch, positions, n, taps)
    x = uniform(dtype, batch, positions, n, seed=seed)
    own_dtype = pick.choice([dtype, torch.float32])
    weight, bias = (uniform(own_dtype, *s, seed=(seed, s)) for s in ((n, taps), (n,)))
    state = uniform(dtype, batch, n, width, seed=(seed, "state"))

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        own = put(state.clone())
        y = ops.causal_conv(put(x), put(weight), put(bias), own, "silu")
        return torch.cat([y.flatten(), own.flatten()])

    return run, (x,)


def delta(kernel: str, dtype: torch.dtype, pick: random.Random) -> Made:
    """y and the state."""
    batch, positions, key_heads, group = (pick.randint(1, 3) for _ in range(4))
    dk, dv, heads = pick.randint(1, 256), 4 * pick.randint(1, 33), key_heads * group
    seed = (kernel, batch, positions, key_heads, group, dk, dv)
    qkv = uniform(dtype, batch, positions, 2 * key_heads * dk + heads * dv, seed=seed)
    a, b = (uniform(dtype, batch, positions, heads, seed=(seed, i)) for i in "ab")
    head_dtype = pick.choice([dtype, torch.float32])
    a_log, dt_bias = (uniform(head_dtype, heads, seed=(seed, i)) for i in range(2))
    state = uniform(torch.float32, batch, heads, dk, dv, seed=(seed, "state"))

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        own = put(state.clone())
        y = ops.gated_delta(put(qkv), put(a), put(b), put(a_log), put(dt_bias), own)
        return torch.cat([y.flatten().float(), own.flatten()])

    return run, (qkv,)


def scan(kernel: str, dtype: torch.dtype, pick: random.Random) -> Made:
    """y and the state."""
    batch, positions, groups, each = (pick.randint(1, 3) for _ in range(4))
    p, n, heads = pick.randint(1, 40), 4 * pick.randint(1, 64), groups * each
    seed = (kernel, batch, positions, groups, each, p, n)
    xbc = uniform(dtype, batch, positions, heads * p + 2 * groups * n, seed=seed)
    dt = uniform(dtype, batch, positions, heads, seed=(seed, "dt"))
    gate = uniform(dtype, batch, positions, heads * p, seed=(seed, "gate"))
    head_dtype = pick.choice([dtype, torch.float32])
    of_heads = [uniform(head_dtype, heads, seed=(seed, i)) for i in range(3)]
    state = uniform(torch.float32, batch, heads, p, n, seed=(seed, "state"))

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        own = put(state.clone())
        y = ops.ssm_scan(put(xbc), put(dt), *map(put, of_heads), own, put(gate), 0.1, 1.5)
        return torch.cat([y.flatten().float(), own.flatten()])

    return run, (xbc,)


RECURRENT = {"causal_conv": conv, "gated_delta": delta, "ssm_scan": scan}

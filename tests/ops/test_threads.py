"""What may not change a bit of a row: its batch, the number of threads, calls at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backends import Backend
from inputs import activations, long_k, random_weight
from oracle import KINDS
from torch import Tensor

ops = torch.ops.metalmm


@pytest.mark.isa
@pytest.mark.formats
def test_rows_of_a_batch_are_those_of_one_row(name: str, backend: Backend) -> None:
    """gemv_batched gives each row the bits that gemv gives it alone, for every M that takes it."""
    k, ms = long_k(name), (2, 5, 9) if backend.is_slow else range(1, 25)
    w = backend.put(random_weight(name, 14, k))
    x = backend.put(activations(ms[-1], k))
    alone = torch.cat([ops.linear(row, w, None, name, "gemv") for row in x.split(1)])
    assert torch.equal(ops.linear(x, w, None, name, "gemv"), alone)
    for m in ms:
        assert torch.equal(ops.linear(x[:m], w, None, name, "gemv_batched"), alone[:m]), m


@pytest.mark.isa
@pytest.mark.parametrize("name", KINDS)
def test_threads_change_no_bit(name: str, backend: Backend) -> None:
    """torch.set_num_threads splits the rows of W, never a sum; plans know nothing of it.

    In which order torch's matmul adds is for torch to say.
    """
    k, n = backend.k(name), 20 if backend.is_slow else 300
    w, x = backend.put(random_weight(name, n, k)), backend.put(activations(30, max(n, k)))
    ids = backend.put(torch.arange(n))
    strategies = () if backend.chip() else set(backend.strategies) - {"dense"}

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        calls = ((m, s) for m in (1, 2, 7, 30) for s in (None, *strategies))
        ys = [ops.linear(x[:m, :k], w, None, name, s) for m, s in calls]
        grad = ops.linear_input_grad(x[:, :n].contiguous(), w, name, k)
        packed = ops.quantize(ops.dequantize(w, name, k), name)
        return [*ys, grad, packed, ops.dequantize(w, name, k), ops.embedding(ids, w, name, k)]

    one = results(1)
    for threads in (3,) if backend.is_slow else (2, 3):
        for i, (a, b) in enumerate(zip(results(threads), one, strict=True)):
            assert torch.equal(a, b), (threads, i)


def test_calls_from_several_threads(backend: Backend) -> None:
    """Eight Python threads that call at once get what one gets."""
    torch.set_num_threads(2)
    names = KINDS[::3] if backend.is_slow else (*KINDS, "q4_k", "mxfp4")
    n_rows = 20 if backend.is_slow else 200
    weights = {n: backend.put(random_weight(n, n_rows, backend.k(n))) for n in names}
    strategies = (None,) if backend.is_slow else (None, *backend.strategies)
    jobs = [(n, m, s) for n in names for m in (1, 5, 30) for s in strategies]

    def call(job: tuple[str, int, str | None]) -> Tensor:
        name, m, strategy = job
        x = backend.put(activations(m, backend.k(name), seed=m))
        return ops.linear(x, weights[name], None, name, strategy)

    alone = [call(job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        for job, a, b in zip(jobs * 3, pool.map(call, jobs * 3), alone * 3, strict=True):
            # In which order torch's matmul adds depends on where its operands lie.
            same = torch.allclose(a, b) if "dense" in job else torch.equal(a, b)
            assert same, job

"""gemm_naive and gemm_tiled of the CPU: exact decoding, the bound of every other strategy."""

from __future__ import annotations

import inputs
import oracle
import pytest
import torch

from torch_metalmm import formats

pytestmark = pytest.mark.covering

STRATEGIES = ("gemm_naive", "gemm_tiled")


@pytest.mark.parametrize("forced", STRATEGIES)
@pytest.mark.parametrize("name", formats.names())
def test_one_hot_rows_give_the_decoded_weight(name: str, forced: str) -> None:
    k = inputs.long_k(name)
    w = inputs.random_weight(name, 5, k)
    got = torch.ops.metalmm.linear(torch.eye(k), w, None, name, forced)
    assert torch.equal(got.t(), oracle.spec(name, w, k))


@pytest.mark.parametrize("forced", STRATEGIES)
@pytest.mark.parametrize("m", (0, 1, 31, 32, 33, 65))
@pytest.mark.parametrize("n", (1, 31, 32, 33))
def test_results_are_within_the_bound(m: int, n: int, forced: str) -> None:
    for name, k in (("f32", 257), ("q4_0", 288), ("q6_k", 512)):
        w, x = inputs.random_weight(name, n, k), inputs.activations(m, k)
        got = torch.ops.metalmm.linear(x, w, None, name, forced)
        oracle.check(got, oracle.linear(x, oracle.spec(name, w, k)), f"{name} {forced}")

"""The recurrent ops against float64 within derived bounds, and the states that they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from inputs import activations
from oracle import DTYPES, Value, check
from recurrent_oracle import causal_conv, check_written, gated_delta, ssm_scan
from torch import Tensor

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules

# Sequences, positions, channels, taps, inputs that the state holds.
CONVS = (
    (1, 1, 300, 4, 4),
    (2, 3, 129, 3, 2),
    (3, 1, 7, 1, 0),
    (1, 33, 40, 8, 11),
    (2, 65, 5, 2, 70),
    (1, 2, 64, 4, 3),
)
# Sequences, positions, heads of q and k and of v, values of these.
DELTAS = (
    (1, 1, 2, 4, 128, 128),
    (2, 3, 1, 3, 20, 12),
    (3, 2, 2, 2, 1, 4),
    (1, 2, 1, 2, 200, 68),
    (1, 9, 2, 2, 64, 32),
)


# Sequences, positions, groups of b and c, heads, values of a head of x, of one of b and of c.
SSMS = (
    (1, 1, 1, 4, 64, 128),
    (2, 3, 1, 3, 20, 12),
    (3, 2, 2, 2, 1, 4),
    (1, 2, 2, 4, 9, 256),
    (1, 9, 2, 2, 33, 68),
    (2, 2, 1, 2, 8, 132),
)


def delta_operands(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of gated_delta, parts of wider rows; a and b with tails, a_log of a real model."""
    batch, positions, key_heads, heads, dk, dv = shape
    values = 2 * key_heads * dk + heads * dv
    wide = activations(batch, positions, values + 2 * heads + 3, dtype=dtype, seed=shape)
    a = wide[..., values + 1 : values + 1 + heads] * 6
    return {
        "qkv": wide[..., 1 : values + 1],
        "a": a,
        "b": wide[..., -heads:] * 4,
        "a_log": activations(heads, seed=("a_log", shape)),
        "dt_bias": activations(heads, seed=("dt", shape)) - 4,
        "state": activations(batch, heads, dk, dv, seed=("state", shape)),
    }


def ssm_operands(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of ssm_scan, parts of wider rows; dt with tails, a_log of a real model."""
    batch, positions, groups, heads, p, n = shape
    values, inner = heads * p + 2 * groups * n, heads * p
    wide = activations(batch, positions, inner + values + heads + 3, dtype=dtype, seed=shape)
    return {
        "xbc": wide[..., inner + 1 : inner + 1 + values],
        "dt": wide[..., -heads:] * 4,
        "a_log": activations(heads, seed=("a_log", shape)),
        "dt_bias": activations(heads, seed=("dt", shape)) - 3,
        "d": activations(heads, seed=("d", shape)),
        "state": activations(batch, heads, p, n, seed=("state", shape)),
        "gate": wide[..., :inner],
    }


def conv_operands(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of causal_conv, x of wider rows."""
    batch, positions, channels, taps, width = shape
    return {
        "x": activations(batch, positions, channels + 6, dtype=dtype, seed=shape)[..., 5:-1],
        "weight": activations(channels, taps, seed=("w", shape)),
        "bias": activations(channels, seed=("b", shape)),
        "activation": "silu",
        "state": activations(batch, channels, width, dtype=dtype, seed=("s", shape)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_causal_conv(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> None:
    """Weights in f32 and in the dtype of x, one of them with and one without a bias."""
    given = conv_operands(shape, dtype)
    check_written(causal_conv, given, backend, f"{shape} silu")
    own = {"weight": given["weight"].to(dtype), "bias": None, "activation": None}
    check_written(causal_conv, given | own, backend, f"{shape} own")
    check_written(causal_conv, given | own | {"bias": given["bias"]}, backend, f"{shape} mixed")


def test_causal_conv_as_the_models_keep_it(backend: Backend) -> None:
    """Zeros before a prompt are torch's padding; then a step on the state that the prompt left."""
    given = conv_operands((2, 9, 6, 4, 4), torch.float32)
    put = {n: backend.put(t) for n, t in given.items()}
    x, state = put.pop("x"), torch.zeros_like(put.pop("state"))
    rows, weight = given["x"].double().mT, given["weight"].double()[:, None]
    want = torch.nn.functional.conv1d(rows, weight, padding=3, groups=6)[..., :9]
    parts = [ops.causal_conv(t, put["weight"], None, state) for t in (x[:, :8], x[:, 8:])]
    y = torch.cat(parts, 1)
    zeros = torch.zeros(2, 6, 4)
    bound, _ = causal_conv(given["x"], given["weight"], None, zeros, None)
    check(y, Value(want.mT, bound.error), "padding")


# (op, its operands, sizes, arguments of a head, what has another dtype than the rows)
SCANS = [(gated_delta, delta_operands, s, ("a_log", "dt_bias"), "b") for s in DELTAS]
SCANS += [(ssm_scan, ssm_operands, s, ("a_log", "dt_bias", "d"), "gate") for s in SSMS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(SCANS)))
def test_a_scan(number: int, dtype: torch.dtype, backend: Backend) -> None:
    """What heads have in f32, in the dtype of the rows, and one so; rows of two dtypes; no gate."""
    scan, operands, shape, of_heads, other = SCANS[number]
    given = operands(shape, dtype)
    check_written(scan, given, backend, str(shape))
    own = {name: given[name].to(dtype) for name in of_heads}
    check_written(scan, given | own | {other: given[other].float()}, backend, f"{shape} own")
    if scan is ssm_scan:
        del given["gate"]
    for name, t in own.items():
        check_written(scan, given | {name: t}, backend, f"{shape} {name} of its own")


def test_gates_far_out_and_large_rows(backend: Backend) -> None:
    """Gates that close and that forget all, q and k of zeros, of 1e-12 and of 1e12."""
    given = delta_operands((2, 4, 1, 4, 64, 16), torch.float32)
    given["a"] = torch.tensor([-90.0, -20.0, 30.0, 1e4]).expand(2, 4, 4)
    given["b"] = torch.tensor([-1e4, -30.0, 30.0, 80.0]).expand(2, 4, 4)
    given["dt_bias"] = torch.zeros(4)
    sizes = torch.tensor([1e-12, 0.0, 1e12, 1.0])
    qk = given["qkv"][..., :128] * sizes[None, :, None]
    given["qkv"] = torch.cat([qk, given["qkv"][..., 128:] * 1e4], -1)
    check_written(gated_delta, given, backend, "far out")
    given["a"], given["a_log"] = torch.full((2, 4, 4), -12.0), torch.full((4,), -9.0)
    check_written(gated_delta, given, backend, "long memory")  # 1 - e^g of 1e-9


def test_limits(backend: Backend) -> None:
    given: dict[str, Any] = ssm_operands((1, 5, 1, 4, 8, 16), torch.float32)
    given["dt"] = torch.tensor([-9.0, -1.0, 1.0, 9.0]).expand(1, 5, 4)
    check_written(ssm_scan, given | {"dt_min": 0.1, "dt_max": 1.7}, backend, "limits")
    check_written(ssm_scan, given | {"dt_min": 0.1}, backend, "least")
    check_written(ssm_scan, given | {"dt_max": 0.0}, backend, "none")


def test_steps_far_out_and_large_rows(backend: Backend) -> None:
    """Steps that keep and that forget all; x, b and c of zeros, of 1e-12 and of 1e9."""
    given = ssm_operands((2, 4, 1, 4, 16, 64), torch.float32)
    given["dt"] = torch.tensor([-90.0, -20.0, 30.0, 1e4]).expand(2, 4, 4)
    given["dt_bias"] = torch.zeros(4)
    given["gate"] = given["gate"] * torch.tensor([-1e4, -30.0, 30.0, 1e4])[:, None].expand(4, 64)
    given["xbc"] = given["xbc"] * torch.tensor([1e-12, 0.0, 1e9, 1.0])[:, None]
    check_written(ssm_scan, given, backend, "far out")
    given["dt"], given["a_log"] = torch.full((2, 4, 4), -12.0), torch.full((4,), -9.0)
    check_written(ssm_scan, given, backend, "long memory")  # 1 - decay of 1e-9


def test_a_long_prompt(backend: Backend) -> None:
    """Within the bound of so many steps."""
    length = 64 if backend.name == "emulator" else 512
    given = ssm_operands((1, length, 1, 2, 8, 16), torch.float32)
    check_written(ssm_scan, given, backend, f"{length} positions")

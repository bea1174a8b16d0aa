"""The selective state-space scan against float64 within derived bounds, and the state it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import Backend
from inputs import activations
from oracle import DTYPES
from recurrent_oracle import check_written, ssm_scan
from torch import Tensor

pytestmark = pytest.mark.schedules

# Sequences, positions, groups of b and c, heads, values of a head of x, of one of b and of c.
SHAPES = (
    (1, 1, 1, 4, 64, 128),
    (2, 3, 1, 3, 20, 12),
    (3, 2, 2, 2, 1, 4),
    (1, 2, 2, 4, 9, 256),
    (1, 9, 2, 2, 33, 68),
    (2, 2, 1, 2, 8, 132),
)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ssm_scan(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> None:
    """What heads have in f32, in xbc's dtype, and one so; no gate, and one of another dtype."""
    given = operands(shape, dtype)
    check_written(ssm_scan, given, backend, str(shape))
    own = {name: given[name].to(dtype) for name in ("a_log", "dt_bias", "d")}
    gate = given.pop("gate")
    check_written(ssm_scan, given | own, backend, f"{shape} own")
    for name, t in own.items():
        check_written(ssm_scan, given | {name: t}, backend, f"{shape} {name} of its own")
    check_written(ssm_scan, given | own | {"gate": gate.float()}, backend, f"{shape} wide gate")


def test_limits(backend: Backend) -> None:
    given: dict[str, Any] = operands((1, 5, 1, 4, 8, 16), torch.float32)
    given["dt"] = torch.tensor([-9.0, -1.0, 1.0, 9.0]).expand(1, 5, 4)
    check_written(ssm_scan, given | {"dt_min": 0.1, "dt_max": 1.7}, backend, "limits")
    check_written(ssm_scan, given | {"dt_min": 0.1}, backend, "least")
    check_written(ssm_scan, given | {"dt_max": 0.0}, backend, "none")


def test_steps_far_out_and_large_rows(backend: Backend) -> None:
    """Steps that keep and that forget all; x, b and c of zeros, of 1e-12 and of 1e9."""
    given = operands((2, 4, 1, 4, 16, 64), torch.float32)
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
    given = operands((1, length, 1, 2, 8, 16), torch.float32)
    check_written(ssm_scan, given, backend, f"{length} positions")

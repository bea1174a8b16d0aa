"""The kernels of a model, collected and compiled before its first answer: recorded on Linux."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorder import recorded
from torch import Tensor, nn

from torch_metalmm import QuantLinear
from torch_metalmm.tools import kernels


class Model(nn.Module):
    """What compile_kernels asks of a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (QuantLinear(n, m, False, "q4_0") for n, m in ((64, 96), (96, 64)))
        self.dtype = torch.float16
        for layer in (self.up, self.down):
            layer.weight.zero_()

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        x = torch.zeros(*input_ids.shape, 64, dtype=self.dtype)
        y: Tensor = self.down(self.up(x))
        return y


def pipelines(calls: list[Any], name: str) -> list[tuple[str, ...]]:
    return [(kernel, *constants) for what, kernel, constants in calls if what == name]


def test_prompts_of_16_tokens_and_more_find_their_kernels() -> None:
    """Each is compiled once, and before anything is encoded."""
    model = Model()
    with recorded("m1-max") as recording:
        count = kernels._compiled(model, torch.device("cpu"), progress=False)
        for length in (1, *range(16, 200, 7), 1024):
            model(torch.zeros(1, length, dtype=torch.int64))
    calls = [call for call in recording if call[0] in ("compile", "set_pipeline")]
    compiled, used = pipelines(calls, "compile"), pipelines(calls, "set_pipeline")
    assert [call[0] for call in calls[:count]] == ["compile"] * count
    assert len(compiled) == len(set(compiled)) == count > 0
    assert set(used) <= set(compiled)


def test_a_model_elsewhere_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected; nothing is collected any longer."""
    assert kernels.compile_kernels(Model()) == 0
    model = Model()
    monkeypatch.setattr(model, "dtype", torch.int32)
    with pytest.raises(ValueError, match="int32|Int"):
        kernels._compiled(model, torch.device("cpu"), progress=False)
    y = Model()(torch.zeros(1, 1, dtype=torch.int64))
    assert torch.equal(y, torch.zeros_like(y))

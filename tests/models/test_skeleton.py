"""Empty models: the dtypes of what they are given."""

from __future__ import annotations

import pytest
import torch
from expert_models import expert_model
from torch import Tensor, nn

from torch_metalmm.models.quantize import plan
from torch_metalmm.models.replace import kept_in_f32
from torch_metalmm.models.skeleton import empty_model, put_dense

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("quiet_transformers")]


class Kept(nn.Module):
    """What transformers' models list: a tensor, a tensor of a module, and a module in another."""

    _keep_in_fp32_modules_strict = {"shift", "gate.weight"}
    _keep_in_fp32_modules = {"inner.first"}

    def __init__(self) -> None:
        super().__init__()
        for name in ("gate", "navigate"):
            self.add_module(name, nn.Linear(32, 4))
        self.inner = nn.ModuleDict({n: nn.Linear(32, 4) for n in ("first", "second")})
        self.shift = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x)


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.float16, {"shift", "gate.weight", "inner.first.weight", "inner.first.bias"}),
        (torch.bfloat16, {"shift", "gate.weight"}),
    ],
)
def test_names_and_their_parts(dtype: torch.dtype, want: set[str]) -> None:
    state = Kept().state_dict()
    assert {name for name in state if kept_in_f32(Kept(), name, dtype)} == want


def test_layers_that_are_kept_are_not_packed() -> None:
    with pytest.warns(UserWarning, match="the model reads their weight itself: gate, inner.first$"):
        jobs = plan(Kept(), "q8_0")
    assert [job.name for job in jobs] == ["navigate", "inner.second"]


def test_a_correction_of_scores_stays_in_f32() -> None:
    """Rounded to bf16, it would choose other experts; the layer that has it is not kept whole."""
    config = expert_model("DeepseekV3").config
    model = empty_model(config, torch.bfloat16)
    gate = "model.layers.1.mlp.gate"
    for leaf in ("e_score_correction_bias", "weight"):
        like = model.state_dict()[f"{gate}.{leaf}"]
        put_dense(model, [f"{gate}.{leaf}"], torch.full(like.shape, 1 + 2.0**-20), "cpu")
    made = model.get_submodule(gate)
    assert made.e_score_correction_bias.dtype == torch.float32
    assert made.e_score_correction_bias.tolist() == [1 + 2.0**-20] * config.n_routed_experts
    # In f32 where the class says so, from transformers 5.24 on.
    kept = "gate.weight" in type(model)._keep_in_fp32_modules_strict
    assert made.weight.dtype == (torch.float32 if kept else torch.bfloat16)

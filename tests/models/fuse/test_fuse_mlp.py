"""fuse_ on gated MLPs: how they are known, what they compute, which form they take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from backends import Backend
from fuse_cases import Gated, Halves, K, N, decoded, fused, packed
from inputs import activations
from layer_models import near
from oracle import DTYPES, Halved, Value, check
from torch import Tensor, nn

from torch_metalmm import _C, QuantLinear
from torch_metalmm.nn.fused import FORMS, FusedMLP, Roles
from torch_metalmm.nn.gate import ACTIVATIONS


def swiglu_exact(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: QuantLinear,
    form: str,
    halved: Sequence[Halved] = (False, False, False),
) -> Value:
    """gate, up: W f32 [N, K]; halved: what the engine rounds of gate, up and down."""
    a, b = (Value.of(x).dot(w, halved=h) for w, h in zip((gate, up), halved[:2], strict=True))
    if form == "swiglu":
        h = (a.silu() * b).store(x.dtype)
    else:
        h = a.store(x.dtype).silu() * b.store(x.dtype)
    y = h.dot(decoded(down), halved=halved[2])
    return (y if down.bias is None else y + Value.of(down.bias.cpu())).store(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("format", ["q4_k", "affine4_g64"])
def test_swiglu_computes_what_the_mlp_did(
    format: str, form: str, dtype: torch.dtype, backend: Backend
) -> None:
    module = fused(Gated(format).to(backend.device), form)
    assert type(module) is FusedMLP and module.gated.roles == Roles("one", "two", "three")
    gate, up = decoded(module.one), decoded(module.two)
    for shape in ((K,), (1, 1, K), (2, 3, K), (0, K)):
        x = activations(*shape, dtype=dtype) / 4
        used = form if x.numel() == K else "swiglu"
        halved = [
            backend.halves(None, dtype, w.format, (x.numel() // K, w.out_features, w.in_features))
            for w in (module.one, module.two, module.three)
        ]
        want = swiglu_exact(x, gate, up, module.three, used, halved)
        check(module(backend.put(x)), want, f"{form} {shape}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", _C.activations())
def test_activations(activation: str, form: str, backend: Backend) -> None:
    """The first that gives the same bits; the op computes what torch does."""
    functions = {
        "silu": nn.SiLU(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU("tanh"),
        "relu2": Squared(),
        "sigmoid": nn.Sigmoid(),
    }
    assert functions.keys() == ACTIVATIONS.keys()
    plain = Gated(act=functions[activation])
    x = activations(2, K) / 4
    want = plain(x)
    module = fused(Gated(act=functions[activation]).to(backend.device), form)
    assert type(module) is FusedMLP and module.gated.activation == activation
    for rows in (x, x[:1]):
        got = module(backend.put(rows)).cpu()
        assert near(got, want[: len(rows)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_of_one_layer(gate_first: bool, form: str, backend: Backend) -> None:
    module = fused(Halves(gate_first).to(backend.device), form)
    assert module.gated.roles == Roles("both", None, "down", gate_first)
    gate, up = decoded(module.both).chunk(2)
    if not gate_first:
        gate, up = up, gate
    for m in (1, 3):
        x = activations(m, K) / 4
        want = swiglu_exact(x, gate, up, module.down, form if m == 1 else "swiglu")
        check(module(backend.put(x)), want, f"{form} {m}")


def test_a_child_may_have_the_name_of_what_is_known_of_an_mlp() -> None:
    """As granitemoeshared's `activation`."""
    module = Gated()
    module.activation = module._modules.pop("act")

    class Named(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.activation(self.one(x)) * self.two(x))

    module.__class__ = Named
    x = activations(2, K) / 4
    want, stood_in = module(x), fused(module)
    assert type(stood_in) is FusedMLP and stood_in.get_submodule("activation") is module.activation
    assert near(stood_in(x), want)


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x).square()


class Cut(Gated):
    """Of a gate what is above all but the largest tenth of normal values."""

    def __init__(self, correction: int = 0) -> None:
        super().__init__()
        self.part, self.correction = 0.9, correction

    def forward(self, x: Tensor) -> Tensor:
        gate = self.one(x)
        mean = gate.mean(-1, keepdim=True)
        std = gate.std(-1, keepdim=True, correction=self.correction)
        above = torch.distributions.Normal(0, 1).icdf(torch.tensor(self.part))
        return self.three(self.act(torch.relu(gate - (mean + std * above))) * self.two(x))


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_that_is_cut(form: str, backend: Backend) -> None:
    plain, x = Cut(), activations(3, K) / 4
    want = plain(x)
    module = fused(Cut().to(backend.device), form)
    assert type(module) is FusedMLP and module.gated.cut == pytest.approx(1.2815516)
    for rows in (x, x[:1]):
        got = module(backend.put(rows)).cpu()
        assert near(got, want[: len(rows)])


class Clamped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        up = self.two(x).clamp(-100, 100)
        return self.three(self.act(self.one(x)) * up)


class Scaled(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class Twice(Gated):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + y


class Writing(Gated):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.data.zero_()
        return y


class Dropping(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class WithState(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


def gated_with(change: str) -> Gated:
    module = Gated()
    if change == "dropout":
        module.act = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    elif change == "bias":
        module.one = packed("q4_k", N, K, bias=True)
    elif change == "hook":
        module.register_forward_hook(lambda *_: None)
    elif change == "layer hook":
        module.two.register_forward_hook(lambda *_: None)
    elif change == "order":
        module.one.input_order = torch.arange(K)
    return module


@pytest.mark.parametrize(
    "module",
    [Gated(act=nn.Tanh()), Cut(1), Clamped(), Scaled(), Twice(), Writing(), WithState()]
    + [gated_with(c) for c in ("dropout", "bias", "hook", "layer hook", "order")],
    ids=lambda m: type(m).__name__,
)
def test_what_is_not_swiglu_stays(module: nn.Module) -> None:
    training = [m.training for m in module.modules()]
    assert fused(module) is module and [m.training for m in module.modules()] == training


def test_a_dropout_is_called_in_training() -> None:
    mlp, x = fused(Dropping()), activations(4, K)
    assert type(mlp) is FusedMLP
    assert (mlp.train()(x) == 0).any() and not (mlp.eval()(x) == 0).any()


def test_a_hook_added_later_is_called() -> None:
    module = fused(Gated())
    x, seen = activations(2, K), []
    before = module(x)
    handle = module.two.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(x), before) and seen == [1]
    handle.remove()
    module(x)
    assert seen == [1]

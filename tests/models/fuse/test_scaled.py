"""Embeddings and heads whose results the model multiplies by a number."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from family_models import family_pair
from torch import Tensor, nn

from torch_metalmm import unfuse_
from torch_metalmm.nn import scaled
from torch_metalmm.nn.fused import owner_of
from torch_metalmm.nn.scaled import Scaled, Waiting

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def granite() -> Any:
    return copy.deepcopy(family_pair("granite")[1])


def found(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(owner_of(m), Scaled)]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(IDS, use_cache=False).logits
    assert type(made) is Tensor
    return made


def near(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).norm() <= 1e-5 * want.norm())


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("granite", 2),
        ("granitemoe", 2),
        ("falcon_h1", 2),
        ("cohere2", 1),
        ("gemma2", 1),
        ("llama", 0),
    ],
)
def test_those_that_a_number_follows(kind: str, count: int) -> None:
    assert len(found(family_pair(kind)[1])) == count


def test_the_number_is_that_of_the_call(granite: Any) -> None:
    own = unfuse_(copy.deepcopy(granite))
    assert not found(own)
    for model in (granite, own):
        model.config.logits_scaling, model.model.embedding_multiplier = 3.0, 0.3
    assert near(logits(granite), logits(own))
    for model in (granite, own):
        model.model.embedding_multiplier = torch.tensor(5.0)  # no number
    assert near(logits(granite), logits(own))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(granite: Any, copied: Any) -> None:
    model = copied(granite)
    assert len(found(model)) == 2 and torch.equal(logits(model), logits(granite))


def test_other_callers_are_given_tensors(granite: Any) -> None:
    head, table = granite.lm_head, granite.model.embed_tokens
    with torch.no_grad():
        for module, x in ((head, torch.randn(2, 128)), (table, IDS)):
            assert type(module(x)) is Tensor
            assert torch.equal(module(x), type(module).forward(module, x))


def waited(module: Any, x: Tensor) -> Any:
    """What the module gives where its own caller multiplies."""
    owner = Scaled(module, None)
    owner._waits = lambda site: True  # type: ignore[method-assign]
    with torch.no_grad():
        return owner.forward(x)


def test_a_result_that_is_read_is_plain(granite: Any) -> None:
    for module, x in ((granite.lm_head, torch.randn(2, 128)), (granite.model.embed_tokens, IDS)):
        want = type(module).forward(module, x)
        made = waited(module, x)
        assert type(made) is Waiting
        assert made.shape == want.shape and made.dtype == want.dtype and made.device == want.device
        assert made.value is None  # masks are made for a result that waits
        assert torch.equal(made + 1, want + 1) and torch.equal(made * 3, want * 3)
        for read in (torch.tanh, lambda t: t[:, -1], lambda t: t * t, lambda t: t * torch.ones(())):
            assert torch.equal(read(waited(module, x)), read(want))
        assert torch.equal(torch.ops.aten.neg.default._op(waited(module, x)), -want)
        assert torch.equal(nn.Identity()(waited(module, x)).clone(), want)
        assert near(waited(module, x) * 3, want * 3) and near(waited(module, x) / 3, want / 3)
        halved = waited(module, x)
        halved *= 0.5
        assert torch.equal(halved, want * 0.5)


def test_when_the_own_forward_computes(granite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[str] = []
    for name in ("_gemm", "_embedding"):
        op = getattr(scaled, name)
        monkeypatch.setattr(scaled, name, lambda *a, op=op, **o: (took.append(""), op(*a, **o))[1])

    def ours(change: Any = lambda m: None) -> int:
        model = copy.deepcopy(granite)
        change(model)
        took.clear()
        got, count = logits(model), len(took)
        assert near(got, logits(unfuse_(model)))
        return count

    size = granite.lm_head.out_features
    assert ours() == 2
    assert ours(lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.ones(size)))) == 1
    assert ours(lambda m: setattr(m.model.embed_tokens, "embed_scale", 2.0)) == 1
    assert ours(lambda m: m.lm_head.register_forward_hook(lambda *a: a[2].abs())) == 1
    took.clear()
    granite(IDS, use_cache=False)  # records gradients
    compiled = torch.compile(granite, backend="eager", fullgraph=True)
    assert near(compiled(IDS, use_cache=False).logits, logits(granite)) and len(took) == 2

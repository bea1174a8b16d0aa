"""cos and sin of positions in one op: to the bit those of the models' own modules, or by these."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from layer_models import family_pair
from torch import Tensor, nn

from bench.models.families import FAMILIES, family
from bench.models.op_counts import Calls
from torch_metalmm import unfuse_
from torch_metalmm.models.fuse.rotations import fuse_rotations
from torch_metalmm.nn import rotation as rotation_room
from torch_metalmm.nn.fused import owner_of
from torch_metalmm.nn.rotation import FusedRotation

pytestmark = pytest.mark.filterwarnings("ignore")

FACTORS = [1.0] * 16
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": FACTORS,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 64,
    },
}
FOLLOW = ("dynamic", "longrope")  # the length of the text


def rotations(model: nn.Module) -> list[Any]:
    return [f for f in map(owner_of, model.modules()) if isinstance(f, FusedRotation)]


def scaled(kind: str) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]}
    return family("llama", rope_parameters=rope)


def assert_same(rotation: Any, *given: Any) -> None:
    want = type(rotation.module).forward(copy.deepcopy(rotation.module), *given)
    got = rotation.module(*given)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def places(*shape: int) -> Tensor:
    return torch.randint(1 << 20, shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family(kind: str) -> None:
    """Each model that rotates has its module found; bits at near and far positions, any dtype."""
    model = copy.deepcopy(family_pair(kind)[0])
    fuse_rotations(model)
    found = rotations(model)
    assert bool(found) == any(n.endswith("inv_freq") for n, _ in model.named_buffers())
    for rotation in found:
        for name, tables in rotation.tables.items():
            given = () if name is None else (name,)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                x = torch.zeros(2, 5, 8, dtype=dtype)
                assert_same(rotation, x, places(2, 5), *given)
                assert_same(rotation, x, torch.arange(5)[None], *given)
            if tables.axes is not None:
                assert_same(rotation, x, places(3, 2, 5))


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotations(kind: str) -> None:
    """Frequencies that follow the length stay the module's to make."""
    model = scaled(kind)
    fuse_rotations(model)
    assert bool(rotations(model)) == (kind not in FOLLOW)
    for rotation in rotations(model):
        assert_same(rotation, torch.zeros(1, 4, 8), torch.tensor([[0, 63, 64, 10**6]]))


def test_when_the_own_forward_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table is old: frequencies are read at each call, what else decides is compared."""
    x, where, op, took = torch.zeros(1, 4, 8), places(1, 4), rotation_room._rope_tables, []

    def counted(*args: Any, **options: Any) -> Any:
        took.append(1)
        return op(*args, **options)

    monkeypatch.setattr(rotation_room, "_rope_tables", counted)

    def changed(change: Any) -> tuple[Any, bool]:
        model = family("qwen3_5_text")
        fuse_rotations(model)
        [rotation] = rotations(model)
        change(rotation.module)
        took.clear()
        assert_same(rotation, x, where)
        return rotation, bool(took)

    _, ours = changed(lambda m: m.inv_freq.mul_(0.5))
    assert ours
    _, ours = changed(lambda m: setattr(m, "inv_freq", m.inv_freq[:2].clone()))
    assert ours
    others = (
        lambda m: setattr(m, "attention_scaling", 1.5),
        lambda m: setattr(m, "mrope_section", [1, 2, 1]),
        lambda m: setattr(m, "rope_type", "linear"),
        lambda m: setattr(m, "inv_freq", m.inv_freq.double()),
    )
    for change in others:
        _, ours = changed(change)
        assert not ours, change
    rotation, _ = changed(lambda m: None)
    took.clear()
    assert_same(rotation, x, where.int())
    assert not took
    copied = pickle.loads(pickle.dumps(rotation.module))
    assert isinstance(copied.forward.__self__, FusedRotation)
    assert all(map(torch.equal, copied(x, where), rotation.module(x, where)))
    model = nn.ModuleList([rotation.module])
    assert rotations(model) and not rotations(unfuse_(model))


@pytest.mark.parametrize("inference", [False, True])
def test_angles_that_are_used_twice_are_made_twice(inference: bool) -> None:
    """gpt_oss has F numbers for heads of 2 F: no copy is made of those that nobody wrote since."""
    model = family("gpt_oss")
    fuse_rotations(model)
    [rotation] = rotations(model)
    with torch.inference_mode(inference):
        cos, sin = rotation.module(torch.zeros(1, 4, 8), places(1, 4))
        beside = [t.repeat(1, 1, 2) for t in (cos, sin)]
        with Calls() as calls:
            assert all(map(torch.equal, rotation_room.tables("twice", cos, sin), beside))
            assert calls.others.count("cat") == 0
            rotation_room.tables("twice", cos.clone(), sin)
            assert calls.others.count("cat") == 1
            cos.mul_(2)
            got = rotation_room.tables("twice", cos, sin)
            assert calls.others.count("cat") == 2 and torch.equal(got[0], 2 * beside[0])
    run = torch.compile(
        lambda t: rotation_room.tables("twice", t, t), fullgraph=True, backend="eager"
    )
    assert torch.equal(run(sin)[0], beside[1])


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "glm4", "nanochat", "gpt_oss"])
@pytest.mark.parametrize("inference", [False, True])
def test_one_op_makes_the_angles_of_one_position(kind: str, inference: bool) -> None:
    """Those of all kinds of layers, and in each form that layers take them in."""
    model = family_pair(kind)[1]
    [rotation] = rotations(model)
    x, at = torch.zeros(1, 1, 8), torch.tensor([[1000]])
    name = next(iter(rotation.tables))
    rotation.module(x, places(1, 3), *([] if name is None else [name]))  # lays the columns
    for _ in range(2):  # no pair is of the step before
        with torch.inference_mode(inference), Calls() as calls:
            made = {n: rotation.module(x, at, *([] if n is None else [n])) for n in rotation.tables}
            formed = {n: rotation_room.tables(f, *made[n]) for n in made for f in rotation.forms}
        assert calls.outside() == ["rope_tables"]
        for name, pair in made.items():
            given = () if name is None else (name,)
            want = type(rotation.module).forward(copy.deepcopy(rotation.module), x, at, *given)
            assert all(map(torch.equal, pair, want))
            for form in rotation.forms:
                wanted = rotation_room.tables(form, *(t.clone() for t in want))
                assert all(map(torch.equal, formed[name], wanted))
        at += 1


@pytest.mark.parametrize("change", ["positions", "dtype"])
def test_what_was_made_for_another_call_is_not_taken(change: str) -> None:
    """A call for one kind of layers makes those of the other, which nobody has asked for."""
    [rotation] = rotations(family_pair("gemma3_text")[1])
    x, at = torch.zeros(1, 1, 8), torch.tensor([[5]])
    rotation.module(x, at, "full_attention")
    if change == "positions":
        at += 7
    else:
        x = x.half()
    assert_same(rotation, x, at, "sliding_attention")


def test_kinds_whose_rows_would_not_be_aligned_are_made_one_by_one() -> None:
    [rotation] = rotations(copy.deepcopy(family_pair("gemma3_text")[1]))
    own = rotation.module._buffers
    for name in [n for n in own if n.endswith("_inv_freq")]:
        own[name] = own[name][:-1].clone()
    x, at = torch.zeros(1, 1, 8), torch.tensor([[5]])
    for kind in ("full_attention", "sliding_attention"):
        rotation.module(x, at, kind)
        with Calls() as calls:
            rotation.module(x, at, kind)
        assert calls.outside() == ["rope_tables"]
        assert_same(rotation, x, at, kind)


def test_frequencies_that_are_changed_are_laid_anew() -> None:
    [rotation] = rotations(copy.deepcopy(family_pair("gemma3_text")[1]))
    x, at = torch.zeros(1, 1, 8), places(1, 1)
    own = rotation.module._buffers
    name = next(n for n in own if n.endswith("_inv_freq"))
    rotation.module(x, at, "full_attention")
    for change in (lambda: own[name].mul_(0.5), lambda: own.update({name: own[name] * 3})):
        change()
        for kind in ("sliding_attention", "full_attention"):
            assert_same(rotation, x, at, kind)


class Other(nn.Module):
    """Angles that have more to them than a product."""

    def __init__(self, shift: float, half: bool) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(1 / 100 ** (torch.arange(4) / 4))
        self.shift, self.half = shift, half

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq + self.shift
        emb = torch.cat((angles, angles / 2 if self.half else angles), -1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


@pytest.mark.parametrize(("shift", "half"), [(0.0, False), (0.25, False), (0.0, True)])
def test_other_angles_stay(shift: float, half: bool) -> None:
    model = nn.ModuleList([Other(shift, half)])
    fuse_rotations(model)
    assert bool(rotations(model)) == (not shift and not half)


class Kinds(nn.Module):
    """Two kinds of layers, of frequencies that are equal at first."""

    def __init__(self) -> None:
        super().__init__()
        for kind in "ab":
            self.register_buffer(f"{kind}_inv_freq", 1 / 100 ** (torch.arange(4) / 4))
        self.said: Any = "a word"

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * getattr(self, f"{layer_type}_inv_freq")
        emb = torch.cat((angles, angles), -1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


class Renamed(Other):
    """What callers name otherwise."""

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden, positions)


def test_a_kind_has_its_own_frequencies() -> None:
    model = nn.ModuleList([Kinds()])
    fuse_rotations(model)
    [rotation] = rotations(model)
    rotation.module.b_inv_freq.mul_(0.5)
    for kind in "ab":
        assert_same(rotation, torch.zeros(1, 4, 8), places(1, 4), kind)


def test_modules_that_say_or_name_something_else_stay() -> None:
    says_tensors = Kinds()
    says_tensors.said = {"t": torch.ones(2)}
    model = nn.ModuleList([says_tensors, Renamed(0.0, False)])
    fuse_rotations(model)
    assert not rotations(model)

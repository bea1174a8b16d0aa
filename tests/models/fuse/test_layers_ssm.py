"""Layers of a selective state space in our ops: states, limits, and what stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_models import padded
from torch import Tensor, nn
from transformers import DynamicCache

from bench.models.families import family, fused_family
from bench.models.op_counts import Calls
from torch_metalmm import PackedCache, fuse_
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.fuse.norms import as_norm
from torch_metalmm.nn.recipe import Ssm

pytestmark = pytest.mark.filterwarnings("ignore")

# As in test_layers_delta.py, with sums of 256 products.
NEAR = 2 * 2 * 14 * 256**0.5 * 2.0**-24
KINDS = ("bamba", "granitemoehybrid", "nemotron_h", "mamba2", "falcon_h1")


def both(kind: str, **options: Any) -> tuple[Any, Any]:
    model = family(kind, **options)
    return model, fuse_(copy.deepcopy(model), "swiglu")


def layers(model: Any) -> Any:
    return (model.model if hasattr(model, "model") else model.backbone).layers


def scan_of(model: Any) -> Ssm | None:
    """What the first layer scans by, None if it is as it was."""
    fused = fused_layer(layers(model)[0])
    mixer = None if fused is None else fused.recipe.mixer
    return mixer if isinstance(mixer, Ssm) else None


def tokens(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(3, 320, (batch, length), generator=generator)


def run(model: Any, cache: Any, *parts: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(p, **with_cache(model, cache), **options).logits for p in parts], 1)


def assert_near(a: Tensor, b: Tensor, near: float = NEAR) -> None:
    assert float((a - b).norm()) <= near * float(b.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_prompt(kind: str) -> None:
    """A prompt, a prompt behind it, and steps leave the states of torch's own forward; so does the
    order of other sequences, and a cache that begins anew with a prompt or with one token."""
    model, fused = both(kind)
    assert scan_of(fused) is not None
    ids = tokens(2, 40)
    parts = ids.split([3, 30, 1, 1, 5], 1)
    caches = [DynamicCache(config=m.config) for m in (model, fused)]
    for first in (2, 1):
        assert_near(run(fused, caches[1], *parts), run(model, caches[0], *parts))
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
        want, got = (c.layers[0] for c in caches)
        assert_near(got.conv_states[0], want.conv_states[0])
        assert_near(got.recurrent_states[0], want.recurrent_states[0])
        assert_near(run(fused, caches[1], ids[:, :2]), run(model, caches[0], ids[:, :2]))
        for cache in caches:
            cache.reset()
        begun = [
            run(m, c, ids[:, :first]) for m, c in zip((fused, model), caches[::-1], strict=True)
        ]
        assert_near(*begun)
    assert_near(run(fused, None, ids, use_cache=False), run(model, None, ids, use_cache=False))


@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind: str) -> None:
    """Prompts that are padded on the left, and on the right, where the state goes on."""
    model, fused = both(kind)
    given = padded(3, 7)
    for flip in (False, True):
        given = {n: t.flip(1) for n, t in given.items()} if flip else given
        caches = [DynamicCache(config=m.config) for m in (model, fused)]
        want, got = (
            m(**given, **with_cache(m, c)).logits
            for m, c in zip((model, fused), caches, strict=True)
        )
        kept = given["attention_mask"].bool()
        assert_near(got[kept], want[kept])
        assert_near(*(c.layers[0].recurrent_states[0] for c in reversed(caches)))


SCAN = ["norm_linear", "causal_conv", "ssm_scan"]
ATTEND = ["norm_linear", "rope_append", "attention"]


@pytest.mark.parametrize(
    ("kind", "names", "others"),
    [
        ("bamba", [*SCAN, "norm_linear", "swiglu", "linear"], []),
        ("mamba2", [*SCAN, "rms_norm", "linear"], []),
        ("falcon_h1", [*SCAN, "gemm", *ATTEND, "gemm", "swiglu", "gemm"], ["mul", "mul"]),
    ],
)
def test_ops_of_a_step(kind: str, names: list[str], others: list[str]) -> None:
    """Norm and projection; convolution; scan; norm and output; those of attention and of an MLP."""
    fused = fused_family(family(kind))
    cache = PackedCache(fused.config, "q8_0")
    run(fused, cache, tokens(1, 3))
    calls = Calls()
    calls.watch(layers(fused))
    with calls:
        run(fused, cache, tokens(1, 1))
    ours, rest = calls.of_layers[0 if kind == "bamba" else 1]  # of falcon_h1 without the slots
    assert [n.rpartition("::")[2].partition(".")[0] for n in ours] == names
    assert [n.rpartition("::")[2].partition(".")[0] for n in rest] == others


def test_limits_of_steps() -> None:
    """transformers limits dt in prompts alone; the numbers are found where no dt reaches them."""
    scan = scan_of(both("mamba2")[1])
    assert scan is not None and scan.limits == ((0.01, 2.0), (0.0, None))
    scan = scan_of(both("mamba2", time_step_limit=(0.0, float("inf")))[1])
    assert scan is not None and scan.limits == ((0.0, None), (0.0, None))
    scan = scan_of(both("nemotron_h", time_step_min=0.25)[1])
    assert scan is not None and scan.limits == ((0.25, None), (0.0, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_models(kind: str, dtype: torch.dtype) -> None:
    options = {"residual_in_fp32": False} if kind == "mamba2" else {}
    model = family(kind, **options).to(dtype)
    assert scan_of(fuse_(model, "swiglu")) is not None


class Late(nn.Module):
    """A gated norm whose gate comes behind it, as some of Falcon-H1's, of groups."""

    def __init__(self, norm: nn.Module, groups: int, first: bool, cut: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = norm.weight, norm.variance_epsilon, groups
        self.first, self.cut = first, cut

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate = gate.clamp(-1, 1) if self.cut else nn.functional.silu(gate)
        x = x * gate if self.first else x
        rows = x.unflatten(-1, (self.groups, -1))
        x = nn.functional.rms_norm(rows, rows.shape[-1:], None, self.eps).flatten(-2) * self.weight
        return x if self.first else x * gate


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gated_norms(groups: int, first: bool) -> None:
    """Groups, and a gate before the norm and behind it; not one that is cut."""
    for cut in (False, True):
        model = family("bamba")
        mixer = layers(model)[0].mamba
        mixer.norm = Late(mixer.norm, groups, first, cut)
        fused = fuse_(copy.deepcopy(model), "swiglu")
        scan = scan_of(fused)
        if cut:
            assert scan is None
        else:
            assert scan is not None and scan.norm is not None
            assert (scan.norm.groups, scan.gate_last) == (groups, not first)
        ids = tokens(1, 6)
        assert_near(run(fused, None, ids), run(model, None, ids))
    assert as_norm(mixer.norm, 256, gated=True, groups=groups, gate_first=first) is None


@pytest.mark.parametrize("before", [True, False])
def test_falcon_with_a_norm(before: bool) -> None:
    """Of groups; the gate comes before the norm, or behind it."""
    options = {"mamba_rms_norm": True, "mamba_norm_before_gate": before, "mamba_n_groups": 2}
    model, fused = both("falcon_h1", **options)
    scan = scan_of(fused)
    assert scan is not None and scan.norm is not None
    assert (scan.norm.groups, scan.gate_last) == (2, before)
    ids = tokens(2, 6)
    caches = [DynamicCache(config=m.config) for m in (model, fused)]
    for part in ids.split([4, 1, 1], 1):
        assert_near(run(fused, caches[1], part), run(model, caches[0], part))


def test_another_rule_stays_as_it_is() -> None:
    """A convolution with gelu."""
    model = family("bamba", hidden_act="gelu")
    assert scan_of(fuse_(copy.deepcopy(model), "swiglu")) is None


def test_the_own_forward_where_ours_says_less() -> None:
    """A gradient of what has none in our ops, and a cache that keeps inputs to go back."""
    model, fused = both("bamba")
    ids = tokens(1, 9)
    for m in (model, fused):
        m(ids, use_cache=False).logits.sum().backward()
    want, got = (layers(m)[0].mamba.conv1d.weight.grad for m in (model, fused))
    assert got is not None and want is not None
    assert_near(got, want, 2 * NEAR)  # there and back
    logits = []
    for m in (model, fused):
        cache = DynamicCache(config=m.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        run(m, cache, ids[:, :4], ids[:, 4:])
        assert cache.layers[0].conv_states[0].shape[-1] == 9
        logits.append(run(m, cache, ids[:, :1]))
    assert_near(logits[1], logits[0])


def test_a_saved_cache(tmp_path: Any) -> None:
    """The states of a prompt, pickled as torch.save does, go on as they were."""
    _, fused = both("bamba")
    cache, ids = PackedCache(fused.config, "q8_0"), tokens(1, 9)
    run(fused, cache, ids[:, :8])
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert torch.equal(run(fused, loaded, ids[:, 8:]), run(fused, cache, ids[:, 8:]))

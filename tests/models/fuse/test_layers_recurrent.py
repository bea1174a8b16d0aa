"""Layers of a convolution, of the gated delta rule, of a selective state space in our ops: states,
limits, and what stays as it was."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from layer_models import ids, layers, near, padded
from torch import Tensor, nn
from transformers import DynamicCache

from bench.models.families import family
from bench.models.op_counts import Calls
from torch_metalmm import PackedCache, fuse_, unfuse_
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.fuse.norms import as_norm
from torch_metalmm.nn.fused import MergedLinear
from torch_metalmm.nn.recipe import Delta, Short, Ssm

pytestmark = pytest.mark.filterwarnings("ignore")

DELTAS = ("qwen3_5_text", "qwen3_next", "lfm2")
SCANS = ("bamba", "granitemoehybrid", "nemotron_h", "mamba2", "falcon_h1")
# Four stages more than other layers (convolution, activation, unit keys, the rule), there and back.
STAGES = 2 * 14


@functools.cache
def both(kind: str, **options: Any) -> tuple[Any, Any]:
    """The model, as it is and fused; no test changes them."""
    model = family(kind, **options)
    return model, fuse_(copy.deepcopy(model), "swiglu")


def mixer_of(model: Any) -> Delta | Short | Ssm | None:
    """What mixes positions in the first layer, None if it is as it was."""
    fused = fused_layer(layers(model)[0])
    mixer = None if fused is None else fused.recipe.mixer
    return mixer if isinstance(mixer, Delta | Short | Ssm) else None


def scan_of(model: Any) -> Ssm | None:
    mixer = mixer_of(model)
    return mixer if isinstance(mixer, Ssm) else None


def run(model: Any, cache: Any, *parts: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(p, **with_cache(model, cache), **options).logits for p in parts], 1)


def assert_near(kind: str, a: Tensor, b: Tensor, times: int = 1) -> None:
    assert near(a, b, 128 if kind in DELTAS else 256, times * STAGES)


@pytest.mark.parametrize("kind", [*DELTAS, *SCANS])
def test_parts_of_a_prompt(kind: str) -> None:
    """A prompt, a prompt behind it, and steps leave the states of torch's own forward; so does the
    order of other sequences, and a cache that begins anew with a prompt or with one token."""
    model, fused = both(kind)
    assert mixer_of(fused) is not None
    check = functools.partial(assert_near, kind)
    given = ids(2, 40)
    parts = given.split([3, 30, 1, 1, 5], 1)
    caches = [DynamicCache(config=m.config) for m in (model, fused)]
    for first in (2, 1):
        check(run(fused, caches[1], *parts), run(model, caches[0], *parts))
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
        want, got = (c.layers[0] for c in caches)
        check(got.conv_states[0], want.conv_states[0])
        if kind != "lfm2":
            check(got.recurrent_states[0], want.recurrent_states[0])
        check(run(fused, caches[1], given[:, :2]), run(model, caches[0], given[:, :2]))
        for cache in caches:
            cache.reset()
        begun = [
            run(m, c, given[:, :first]) for m, c in zip((fused, model), caches[::-1], strict=True)
        ]
        check(*begun)
    check(run(fused, None, given, use_cache=False), run(model, None, given, use_cache=False))


@pytest.mark.parametrize("kind", SCANS)
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
        assert_near(kind, got[kept], want[kept])
        assert_near(kind, *(c.layers[0].recurrent_states[0] for c in reversed(caches)))


def test_limits_of_steps() -> None:
    """transformers limits dt in prompts alone; the numbers are found where no dt reaches them."""
    scan = scan_of(both("mamba2")[1])
    assert scan is not None and scan.limits == ((0.01, 2.0), (0.0, None))
    scan = scan_of(both("mamba2", time_step_limit=(0.0, float("inf")))[1])
    assert scan is not None and scan.limits == ((0.0, None), (0.0, None))
    scan = scan_of(both("nemotron_h", time_step_min=0.25)[1])
    assert scan is not None and scan.limits == ((0.25, None), (0.0, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "mamba2", "falcon_h1"])
def test_narrow_models(kind: str, dtype: torch.dtype) -> None:
    options = {"residual_in_fp32": False} if kind == "mamba2" else {}
    model = family(kind, **options).to(dtype)
    assert mixer_of(fuse_(model, "swiglu")) is not None


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
@pytest.mark.parametrize("groups", [1, 4])
def test_gated_norms(groups: int, first: bool) -> None:
    """Groups, and a gate before the norm and behind it; not one that is cut."""
    model = family("bamba")
    mixer = layers(model)[0].mamba
    cut = Late(mixer.norm, groups, first, True)
    assert as_norm(cut, 256, gated=True, groups=groups, gate_first=first) is None
    mixer.norm = Late(mixer.norm, groups, first, False)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    scan = scan_of(fused)
    assert scan is not None and scan.norm is not None
    assert (scan.norm.groups, scan.gate_last) == (groups, not first)
    given = ids(1, 6)
    assert_near("bamba", run(fused, None, given), run(model, None, given))


def test_products_of_mixers_side_by_side_are_one() -> None:
    """And come apart again, with the names and the bytes that they had."""
    model, fused = both("falcon_h1")
    assert list(fused.state_dict()) == list(model.state_dict())
    assert all(map(torch.equal, fused.state_dict().values(), model.state_dict().values()))
    own = copy.deepcopy(fused)
    merged = [n for n, m in own.named_modules() if isinstance(m, MergedLinear)]
    assert [name.count("_proj") for name in merged] == [4, 4]
    names = [name for name, _ in model.named_modules()]
    assert [name for name, _ in unfuse_(own).named_modules()] == names
    given = ids(2, 9)
    assert torch.equal(own(given).logits, model(given).logits)


MIXERS = {"qwen3_5_text": "linear_attn", "bamba": "mamba"}


@pytest.mark.parametrize("kind", MIXERS)
def test_another_rule_stays_as_it_is(kind: str) -> None:
    """A convolution with gelu, and a gated norm that is not silu's."""
    assert mixer_of(fuse_(family(kind, hidden_act="gelu"), "swiglu")) is None
    model = family(kind)
    mixer = getattr(layers(model)[0], MIXERS[kind])
    mixer.norm = Late(mixer.norm, 1, False, True)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    assert mixer_of(fused) is None
    given = ids(1, 6)
    assert_near(kind, run(fused, None, given), run(model, None, given))


@pytest.mark.parametrize("kind", MIXERS)
def test_the_own_forward_where_ours_says_less(kind: str) -> None:
    """A gradient of what has none in our ops, and a cache that keeps inputs to go back."""
    model, fused = both(kind)
    given = ids(1, 9)
    grads = []
    for m in (model, fused):
        weight = getattr(layers(m)[0], MIXERS[kind]).conv1d.weight
        loss = m(given, use_cache=False).logits.sum()
        grads += torch.autograd.grad(loss, weight)
    assert_near(kind, grads[1], grads[0], 2)  # there and back
    logits = []
    for m in (model, fused):
        cache = DynamicCache(config=m.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        run(m, cache, given[:, :4], given[:, 4:])
        assert cache.layers[0].conv_states[0].shape[-1] == 9
        logits.append(run(m, cache, given[:, :1]))
    assert_near(kind, logits[1], logits[0])


def test_a_saved_cache(tmp_path: Any) -> None:
    """The states of a prompt, pickled as torch.save does, go on as they were."""
    _, fused = both("bamba")
    cache, given = PackedCache(fused.config, "q8_0"), ids(1, 9)
    run(fused, cache, given[:, :8])
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert torch.equal(run(fused, loaded, given[:, 8:]), run(fused, cache, given[:, 8:]))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
def test_an_output_that_takes_its_input_in_another_order(kind: str) -> None:
    """As of GGUF files, whose heads are in another order; the one that a state dict brings, too."""
    model = family(kind)
    outputs = [
        (n, m) for n, m in model.named_modules() if n.endswith(("conv.out_proj", "out_proj"))
    ]
    orders = {f"{name}.input_order": torch.randperm(m.in_features) for name, m in outputs}
    for name, output in outputs:
        output.input_order = orders[f"{name}.input_order"]
    fused, given = fuse_(copy.deepcopy(model), "swiglu"), ids(2, 9)
    assert mixer_of(fused) is not None
    assert_near(
        kind, run(fused, None, given, use_cache=False), run(model, None, given, use_cache=False)
    )
    state = {name: order.flip(0) for name, order in orders.items()}
    for each in (model, fused):
        each.load_state_dict(state, strict=False)
    with Calls() as calls:
        got = run(fused, None, given, use_cache=False)
    assert "causal_conv" in calls.ours
    assert_near(kind, got, run(model, None, given, use_cache=False))

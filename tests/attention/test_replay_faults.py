"""Steps that end half-way, that another's code changes, or that look like those recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_models import ids, small
from replay_pair import HYBRID, WINDOW, Pair, fused, recorded, unfused
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bench.models.families import family, fused_family
from torch_metalmm import _C, PackedCache, fuse_
from torch_metalmm.hf.caches.layers import SLACK
from torch_metalmm.hf.caches.slots import Fixed
from torch_metalmm.hf.replay import _HELD, explain
from torch_metalmm.models.cache_argument import with_cache


def test_states_are_advanced_once_where_a_recording_ends() -> None:
    """The recurrent layer has written its state when the next one says that it cannot."""
    pair = Pair(unfused(fused(HYBRID), 1), "q8_0/q8_0")
    pair.step(9)
    pair.go_on(3, 2)
    assert pair.steps.why == "a layer that fuse_ has not changed, for several tokens"


def test_states_of_a_step_that_fails_are_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(fused(HYBRID), "q8_0/q8_0")
    pair.step(9)
    own = type(pair.model).forward

    def fail(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, torch.no_grad(), pytest.raises(KeyboardInterrupt):
        patched.setattr(type(pair.model), "forward", fail)
        pair.model(input_ids=ids(1, 1), **with_cache(pair.model, pair.caches[0]))
    pair.step()


def test_a_slot_is_no_number_that_two_recordings_share() -> None:
    """Rows of a window are in the same slots every SLACK tokens; a layer of Python knows them."""
    pair = Pair(unfused(fused("gemma3_text"), 0), "f32")
    pair.step(WINDOW + SLACK)
    sliding: list[Any] = [c.layers[0] for c in pair.caches]
    forward, ends = pair.model.forward, list[int]()
    # Behind a long prompt the rows move; then a step, one SLACK tokens later, and more.
    for count, is_own in ((1, True), (1, False), (SLACK - 1, True), (4, False)):
        pair.model.forward = pair.steps.original if is_own else forward
        for seed in range(count):
            ends.append(sliding[0].end)
            pair.step(seed=seed)
    assert ends[1] == ends[1 + SLACK] and sliding[0].base > 0
    assert pair.steps.replays == 0


class Interrupted:
    """The n-th call of a function ends in KeyboardInterrupt, before it or behind it."""

    def __init__(self, function: Callable[..., Any], n: int) -> None:
        self.function, self.left = function, n

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        out = self.function(*args, **kwargs)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_an_interrupted_step_leaves_slots_that_are_written_anew(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = recorded(fused("gemma3_text"))
    (step,) = (s for s in pair.steps.kinds() if s.replays)
    with monkeypatch.context() as patched:
        patched.setattr(step.cache.fixed, "_memory", _Late(step.cache.fixed._memory))
        patched.setattr(torch, "arange", Interrupted(torch.arange, n))
        for _ in range(2):  # while they are moved on, then while they are written anew
            with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                pair.model(input_ids=ids(1, 1), **with_cache(pair.model, pair.caches[0]))
    assert pair.replays()


class _Late:
    """Numbers whose move never ends."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def add_(self, shift: int) -> None:
        self._numbers.add_(shift)
        raise KeyboardInterrupt


def test_all_layers_count_the_rows_of_a_step_or_none() -> None:
    """The call that sets the ends is one of C: Python's code is where a signal is seen."""
    import dis

    from torch_metalmm.hf.caches.recorded import PackedStep

    stores = [i for i in dis.get_instructions(PackedStep.done) if i.opname == "STORE_ATTR"]
    assert not stores


def test_positions_that_a_fixed_slot_has_are_absolute() -> None:
    fixed = Fixed(2, torch.device("cpu"), [0])
    fixed._slots[0].fill_(99)  # whatever an interrupted write left
    fixed.fill(7, {0: 5})
    slots, length = fixed.of((5, 2, torch.device("cpu")), 0)  # type: ignore[misc]
    assert slots.tolist() == [5, 6] and int(length) == 7 and int(fixed.position) == 7


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_another_call_of_a_class_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = recorded()
    own, kind = getattr(nn.Module, name), type(pair.model.model.norm)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, lambda self, *a, **k: 2 * own(self, *a, **k))
        assert not pair.go_on()
    assert pair.replays()


def test_an_expert_beside_the_others_that_moves_is_seen() -> None:
    """A layer of experts reads the one that all share in the memory of the others, if it lies
    there: by its address, which no op has."""
    model = fused_family(family("qwen3_5_moe_text"))
    pair = recorded(model)
    before = pair.step(seed=9)
    shared = next(m for n, m in model.named_modules() if n.endswith("shared_expert"))
    weight = next(shared.parameters())
    weight.data = weight.data.flip(0).clone()
    replays = pair.steps.replays
    assert not torch.equal(before, pair.step(seed=9))
    assert pair.steps.replays == replays


def test_a_list_in_the_config_is_seen() -> None:
    pair = recorded(fused("gemma3_text"))
    pair.model.config.layer_types.reverse()
    assert not pair.go_on()


def test_an_attention_function_of_the_same_name_is_seen() -> None:
    model = unfused(fused(), 1)
    model.config._attn_implementation = "sdpa"
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = own(*args, **kwargs)
        return 2 * out, weights

    pair = Pair(model, "f16")
    pair.step(5)
    pair.step()
    AttentionInterface.register("sdpa", doubled)
    try:
        pair.step()
        assert "the attention function sdpa is of" in pair.steps.why
    finally:
        AttentionInterface.register("sdpa", own)


def _with_head(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The model whose head reads its input in another way, in code of ours as it seems."""
    kind = type(model.lm_head)

    def forward(self: Any, x: Tensor) -> Any:
        return kind.forward(self, change(x))

    model.lm_head.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    type(model.lm_head).__module__ = kind.__module__
    return model


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: torch.tensor(p.tolist()), "gives the host a value"),
        (lambda p: torch.from_numpy(p.numpy().copy()), "numpy gives the host a value"),
        (lambda p: p.masked_select(p == p).view(p.shape), "masked_select has a result whose size"),
        (lambda p: _Own.apply(p), "_Own is no op"),
    ],
    ids=["tolist", "numpy", "masked_select", "function"],
)
def test_what_no_list_can_have(change: Callable[[Tensor], Tensor], why: str) -> None:
    pair = Pair(_with_head(fused(), change), "q8_0/q8_0")
    pair.step(5)
    assert not pair.replays()
    assert why in pair.steps.why


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_first_call_that_is_no_op() -> None:
    step = torch.classes.metalmm.Step()
    step.start()
    y = _Own.apply(torch.ones(2))
    step.stop(True)
    assert step.problem([y]) == "_Own is no op"


@pytest.mark.parametrize(("every", "replays"), [(False, 3), (True, 0)], ids=["once", "in turns"])
def test_recordings_that_differ(every: bool, replays: int) -> None:
    """The first may have a copy that is made once, say for a device. Steps in turns stay apart."""
    calls = 0

    def change(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x + 0 if (calls % 4 == 3 if every else calls == 3) else x

    pair = Pair(_with_head(fused(), change), "q8_0/q8_0")
    pair.step(5)  # two calls, as each step
    assert pair.go_on(6) == replays, pair.steps.why
    assert replays or "in one step" in pair.steps.why


def test_a_failed_recording_is_no_half_of_a_list() -> None:
    pair = Pair(fused(), "q8_0/q8_0")
    pair.step(5)
    with torch.no_grad(), pytest.raises(IndexError):
        pair.model(input_ids=torch.tensor([[10**6]]), **with_cache(pair.model, pair.caches[0]))
    assert pair.replays(), pair.steps.why


def test_a_step_within_a_step_that_is_recorded_is_the_models_own() -> None:
    """As of a wrapper of transformers whose language model is fused, too."""
    inner, pair = fused(), recorded()
    cache = PackedCache(inner.config, "f16")

    def read(p: Tensor) -> Tensor:
        with torch.no_grad():
            logits = inner(input_ids=ids(1, 1), **with_cache(inner, cache)).logits
        return p + 0 * logits.argmax(-1, True)

    outer = Pair(_with_head(fused(), read), "q8_0/q8_0")
    for count in (5, 1, 1, 1):
        outer.step(count)
    assert pair.replays()


def test_a_mask_that_hides_nothing_is_no_reason() -> None:
    pair = Pair(fused(), "q8_0/q8_0")
    pair.step(5)
    for i in range(5):
        pair.step(seed=i, attention_mask=torch.ones(1, 6 + i, dtype=torch.long))
    assert pair.steps.replays == 3, pair.steps.why


def test_a_chunk_that_is_full_is_the_models_own() -> None:
    sizes = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96}
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 1]}
    given = {"head_dim": 32, "num_experts_per_tok": 1, "moe_layers": [], **sizes, **kinds}
    pair = Pair(fuse_(small("llama4_text", **given), "swiglu", cache="f16"), "f16")
    pair.step(2)
    why = []
    for i, count in enumerate((1, 2, 1, 1, 1, 1, 2)):
        pair.step(count, seed=i)
        why.append("a chunk that is full" in pair.steps.why)
    assert why == [False, True, False, False, True, True, True]


def test_kinds_of_steps_that_are_taken_stay() -> None:
    pair = recorded()
    for i in range(_HELD + 2):  # numbers in a call are of its kind
        pair.step(logits_to_keep=i)
        assert len(pair.steps.kinds()) <= _HELD
        assert pair.go_on() == 1


def test_a_model_that_changes_at_every_step_is_not_recorded_for_ever() -> None:
    pair = Pair(fused(), "q8_0/q8_0")
    pair.step(5)
    for seed in range(20):
        if seed % 2 == 0:  # between two recordings, and behind the second
            pair.model.model.norm.variance_epsilon = 0.001 * (seed + 1)
        pair.step(seed=seed)
    assert pair.steps.replays == 0
    assert pair.steps.why == "the model changes between its steps"


def test_a_model_that_has_its_cache_is_freed() -> None:
    pair = recorded()
    assert "steps were replayed" in explain(pair.model)
    model = pair.model
    model.kept = pair.caches[0]
    seen = weakref.ref(model)
    del model, pair
    gc.collect()
    assert seen() is None


def test_objects_of_a_guard_are_seen_by_gc() -> None:
    held, other = [object()], object()
    guard = _C.Guard([{}], [held], [({"key": held}, "key", held)], [held])
    assert guard in gc.get_referrers(held) and guard not in gc.get_referrers(other)

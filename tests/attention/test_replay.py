"""Steps that are recorded and replayed, beside the model's own forward on a cache of its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_models import ids, layers
from replay_pair import HYBRID, KINDS, WINDOW, Pair, fused, on, recorded, steps_of
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_metalmm import _C, PackedCache
from torch_metalmm.hf.caches.layers import SLACK
from torch_metalmm.hf.caches.paged import Text, paged_cache
from torch_metalmm.hf.replay import Replayed
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.testing import emulated

# (engine, model, sequences, tokens of a prompt, of a step): a window that begins, and one that is
# full; states, which are written in place, so that a step finds what the step before left.
CASES = [("cpu", kind, batch, 2, 1) for kind in KINDS for batch in (1, 3)]
CASES += [("cpu", kind, 1, 2, count) for kind in KINDS for count in (2, 8)]
CASES += [("emulator", "llama", 1, 2, 1), ("emulator", "qwen3", 2, 2, 2)]
CASES += [("emulator", "gemma3_text", 1, 2, 3)]
CASES += [
    (engine, *kind, count)
    for kind in (("gemma3_text", 1, WINDOW - 3), (HYBRID, 2, 9))
    for engine, count in (("cpu", 1), ("cpu", 3), ("emulator", 1))
]


@pytest.mark.parametrize(("engine", "kind", "batch", "prompt", "count"), CASES)
def test_a_replayed_step_is_the_models_own(
    engine: str, kind: str, batch: int, prompt: int, count: int
) -> None:
    model = fused(kind)  # confirmed on the CPU: that is a prompt of 200 tokens
    rotated = "q8_0_rotated/q4_0_rotated"
    with on(engine):
        pair = Pair(model, rotated if kind == HYBRID else "q8_0/q8_0", batch)
        pair.step(prompt)
        kept = []
        for seed in range(6):
            logits = pair.step(count, seed=seed)
            kept.append((logits, logits.clone()))
        assert pair.steps.replays == 4, pair.steps.why
        assert all(torch.equal(*each) for each in kept)  # no step writes another's logits
        if engine == "cpu":  # what is recorded of a cache is no engine's
            pair.reset()
            pair.step(2)
            assert pair.go_on(4, count) >= 2, pair.steps.why


def test_rows_of_a_window_move_between_replays() -> None:
    pair = Pair(fused("gemma3_text"), "f16")
    pair.step(2)
    # Two recordings after the first tokens, and two where the layers get more memory.
    assert pair.go_on(WINDOW + SLACK + 20) >= WINDOW + SLACK + 20 - 6, pair.steps.why
    sliding = next(layer for layer in pair.caches[0].layers if layer.is_sliding)
    assert sliding.base > 0


def test_a_step_of_an_engine_is_one_list_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of this model is 6 ops; positions that are given leave no other op to call."""
    lists, replay = [], Replayed._replay

    def spy(self: Replayed, step: Any, cache: Any) -> Any:
        lists.append((step.native.called(), *step.native.launched()))
        return replay(self, step, cache)

    monkeypatch.setattr(Replayed, "_replay", spy)
    model = fused()
    with emulated():
        model.generate(ids(1, 6), max_new_tokens=5, do_sample=False)
    assert len(lists) == 2 and lists[0] == lists[1]
    called, passes, blocks = lists[0]
    assert (called, blocks) == ([], 1) and passes >= 6 * 2 + 3


def test_on_metal_a_token_enters_the_queue_once() -> None:
    """The recorder computes nothing, and sees what torch's queue would."""
    model = fused()
    cache: Any = PackedCache(model.config, "q8_0/q8_0")
    with torch.no_grad():
        model(input_ids=ids(1, 6), past_key_values=cache)
        _C.install_recorder("m4-max")
        blocks = [_C.recorder_blocks()]
        try:
            for i in range(5):
                given = {"position_ids": torch.tensor([[6 + i]]), "past_key_values": cache}
                model(input_ids=torch.tensor([[1]]), **given)
                blocks.append(_C.recorder_blocks())
        finally:
            names = [call[0] for call in _C.remove_recorder()]
    assert steps_of(model).replays == 3
    each = [b - a for a, b in itertools.pairwise(blocks)]
    assert each[0] == each[1] >= 6 * 2 and each[2:] == [1, 1, 1]
    assert names.count("dispatch") % 5 == 0 and names.count("commit") >= 1


def test_a_list_is_of_the_engine_that_launched() -> None:
    """What the emulator launched is not launched when it is gone; a list of ops asks anew."""
    model = fused()
    pair = Pair(model, "q8_0/q8_0")
    pair.step(2)
    for engine, replays in (("emulator", 2), ("cpu", 2), ("emulator", 4)):
        with on(engine):
            assert pair.go_on(4) == replays


def test_a_paged_cache() -> None:
    """Each doubling of the longest text's pages is recorded again."""
    model, count = fused("gemma3_text"), 150
    found = steps_of(model)
    cache = paged_cache(model, "q8_0/q8_0", 1 << 22)
    texts = [Text(cache), Text(cache)]
    own = type(model).forward
    for i in range(count):
        given = {
            "input_ids": ids(2, 1, seed=i),
            "position_ids": cache.begin_step(texts, 1),
            "logits_to_keep": 1,
            **with_cache(model, cache),
        }
        with torch.no_grad():
            want = own(model, **given).logits
            assert torch.equal(model(**given).logits, want)
        for text in texts:
            text.extend([0])
    assert found.replays == count - 2 * 3, found.why


def test_growth_records_again() -> None:
    pair = Pair(fused(cache="f16"), "f16")
    pair.step(250)
    capacities = set()
    for i in range(20):
        pair.step(seed=i)
        capacities.add(pair.caches[0].layers[0].keys.shape[2])
    assert len(capacities) == 2
    assert pair.steps.replays == 20 - 4  # two recordings before the cache grows, and two behind


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "last eps": lambda m: _set(m.model.norm, "variance_epsilon", 0.5),
    "written in place": lambda m: m.model.norm.weight.data.mul_(2),
    "packed bytes in place": lambda m: layers(m)[0].mlp.down_proj.weight.data.zero_(),
    "another tensor": lambda m: _set(m.model.norm, "weight", nn.Parameter(m.model.norm.weight * 3)),
    "data": lambda m: _set(m.model.norm.weight, "data", m.model.norm.weight.data * 3),
    "rotation": lambda m: _set(m.model.rotary_emb, "attention_scaling", 0.5),
}
EAGER: dict[str, Callable[[Any], Any]] = {
    "eps": lambda m: _set(layers(m)[1].input_layernorm, "variance_epsilon", 0.5),
    "hook": lambda m: layers(m)[0].mlp.register_forward_hook(lambda _m, _i, out: out * 2),
    "hook of the head": lambda m: m.lm_head.register_forward_hook(lambda _m, _i, out: out * 2),
    "child": lambda m: _set(layers(m)[1], "post_attention_layernorm", _Twice(m)),
    "forward": lambda m: _set(m.model.norm, "forward", lambda x: x * 2),
    "training": lambda m: layers(m)[1].train(),
    "class": lambda m: _set(m.model.norm, "__class__", _doubling(type(m.model.norm))),
}


def _doubling(kind: Any) -> type:
    return type("Twice", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


class _Twice(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = layers(model)[1].post_attention_layernorm

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


def test_two_steps_of_one_position_do_not_make_a_recording() -> None:
    """A layer that computes itself writes at a slot that its code of Python knows."""
    pair = Pair(fused(), "f16")
    EAGER["eps"](pair.model)
    pair.step(5)
    for seed in range(4):
        pair.step(seed=seed)
        for each in pair.caches:
            each.crop(-1)
    pair.go_on(4)
    assert pair.steps.replays == 0


@pytest.mark.parametrize("what", [*CHANGES, *EAGER])
def test_a_change_of_the_model_is_seen(what: str) -> None:
    pair = recorded()
    before = pair.step(seed=9)
    for each in pair.caches:
        each.crop(-1)
    undo = (CHANGES | EAGER)[what](pair.model)
    after = pair.step(seed=9)
    assert what in ("training", "class") or not torch.equal(before, after)
    assert pair.replays() == (what in CHANGES), pair.steps.why
    if isinstance(undo, RemovableHandle):
        undo.remove()
        assert pair.replays()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"output_hidden_states": True}, "hidden_states"),
        ({"attention_mask": "hides"}, "attention_mask"),
        ({"logits_to_keep": torch.tensor([0])}, "logits_to_keep"),
    ],
)
def test_a_step_of_another_kind_is_the_models_own(given: dict[str, Any], why: str) -> None:
    pair = recorded()
    if "attention_mask" in given:
        given = {"attention_mask": torch.ones(1, 10, dtype=torch.long)}
        given["attention_mask"][0, 0] = 0
    pair.step(**given)
    assert why in pair.steps.why
    assert pair.replays()


def test_what_the_host_reads_ends_a_recording() -> None:
    model = fused()
    pair = Pair(model, "q8_0/q8_0")
    pair.step(5)
    # dynamic angles ask for the last position
    model.model.rotary_emb.rope_type = "dynamic"
    model.model.rotary_emb.max_seq_len_cached = model.model.rotary_emb.original_max_seq_len = 512
    assert not pair.replays()
    assert "gives the host a value" in pair.steps.why


def test_positions_that_are_given_are_read() -> None:
    pair = Pair(fused(), "q8_0/q8_0")
    pair.step(5)
    for i in range(8):
        pair.step(seed=i, position_ids=torch.tensor([[3 * i + 7]]))
    assert pair.steps.replays == 6


def test_a_failing_step_leaves_no_rows() -> None:
    pair = recorded()
    cache = pair.caches[0]
    length = cache.get_seq_length()
    with torch.no_grad(), pytest.raises(IndexError):
        pair.model(input_ids=torch.tensor([[10**6]]), past_key_values=cache)
    assert cache.get_seq_length() == length
    assert pair.replays()


def test_a_copy_records_its_own_steps() -> None:
    model = fused()
    other = copy.deepcopy(model)
    assert steps_of(other).module is other
    pair = Pair(other, "q8_0/q8_0")
    pair.step(5)
    other.model.norm.weight.data.mul_(2)
    assert pair.replays()


def test_generate_replays_its_steps() -> None:
    model = fused()
    found = steps_of(model)
    prompt = ids(2, 6)
    got = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert found.replays >= 15, found.why
    found.detach()
    assert torch.equal(got, model.generate(prompt, max_new_tokens=20, do_sample=False))

"""A list of launches as a graph of torch's; what a model says of its steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_models import fused, ids
from replay_pair import steps_of
from torch import Tensor

from torch_metalmm import PackedCache
from torch_metalmm.hf import graphs
from torch_metalmm.hf.replay import explain
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.testing import emulated

STEPS = 9
REPLAYED = STEPS - 3  # behind the one that fills the cache, and two recordings


class Captured:
    """In the place of CUDA's: it captures without a run, and runs what it captured."""

    made = 0

    def __init__(self, run: Callable[[], list[Tensor]], device: torch.device, shown: int) -> None:
        Captured.made += 1
        self._run, self._shown = run, shown

    def run(self) -> list[Tensor]:
        results = self._run()
        count = len(results) - self._shown
        return [t.clone() for t in results[:count]] + results[count:]


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return fused("llama", "q8_0/q8_0", head_dim=32, dtype=dtype)


def stepped(
    forward: Callable[..., Any], model: Any, cache: Any = None, device: str = "cpu"
) -> list[Tensor]:
    """The logits of a few steps on a cache, by default one of their own."""
    cache, found = cache or PackedCache(model.config, "q8_0/q8_0"), []
    with torch.no_grad():
        for i in range(STEPS):
            given = {"position_ids": torch.tensor([[i]], device=device)}
            step = ids(1, 1, seed=i).to(device)
            found.append(forward(input_ids=step, **given, **with_cache(model, cache)).logits)
    return found


def test_a_list_becomes_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.GRAPHS, "cpu", Captured)
    monkeypatch.setattr(Captured, "made", 0)
    model = model_of()
    steps = steps_of(model)
    cache = PackedCache(model.config, "q8_0/q8_0")
    with emulated():
        want = stepped(steps.original, model)
        got = stepped(model, model, cache)
        assert "passes in 1 list, as a graph of torch's" in explain(model)
    assert Captured.made == 1
    assert all(map(torch.equal, got, want))
    assert steps.replays == REPLAYED


@pytest.mark.parametrize(
    "op, graphs_made",
    [
        (lambda t: t * 2, 1),
        (torch.nonzero, 0),  # the host waits for the number of rows
        (lambda t: t[: int(t[0])], 0),
        (lambda t: t.to("meta"), 0),  # another device
    ],
)
def test_which_ops_make_no_graph(
    op: Callable[[Tensor], Tensor], graphs_made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(graphs.GRAPHS, "cpu", Captured)
    monkeypatch.setattr(Captured, "made", 0)
    runs = graphs.Runs(lambda: [op(torch.ones(2))], torch.device("cpu"), 0)
    assert all(len(runs()) == 1 for _ in range(graphs.AFTER + 2))
    assert Captured.made == graphs_made


def test_ops_of_torch_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.GRAPHS, "cpu", Captured)
    monkeypatch.setattr(Captured, "made", 0)
    model = model_of()  # on a CPU all ops are called
    stepped(model, model)
    assert Captured.made == 1


def test_a_list_that_torch_does_not_capture_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(*_: Any) -> None:
        tries.append(1)
        raise RuntimeError("not while capturing\nmore of it")

    monkeypatch.setitem(graphs.GRAPHS, "cpu", fail)  # type: ignore[arg-type]
    model = model_of()
    steps = steps_of(model)
    cache = PackedCache(model.config, "q8_0/q8_0")
    with emulated():
        want, got = stepped(steps.original, model), stepped(model, model, cache)
        assert "of which torch captures no graph: not while capturing\n" in explain(model)
    assert all(map(torch.equal, got, want)) and len(tries) == 1
    assert steps.replays == REPLAYED


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's graphs")
def test_a_graph_of_cuda_is_the_list() -> None:
    model = model_of(torch.float16).to("cuda")
    steps = steps_of(model)
    want, got = (stepped(each, model, device="cuda") for each in (steps.original, model))
    assert all(map(torch.equal, got, want))
    assert steps.replays == REPLAYED, steps.why


def test_a_replay_returns_what_the_model_does() -> None:
    model, cache = model_of(), PackedCache(model_of().config, "q8_0/q8_0")
    steps = steps_of(model)
    stepped(model, model, cache)
    with torch.no_grad():
        given = {"position_ids": torch.tensor([[STEPS]]), **with_cache(model, cache)}
        got = model(input_ids=ids(1, 1), **given)
        want = steps.original(input_ids=ids(1, 1), **given)
    assert steps.replays == REPLAYED + 1
    assert type(got) is type(want)
    assert list(got) == list(want) and vars(got).keys() == vars(want).keys()
    assert got.logits is got["logits"] is got[0] and cache in got.to_tuple()


def test_recordings_go_with_their_cache() -> None:
    model = model_of()
    cache = PackedCache(model.config, "q8_0/q8_0")
    stepped(model, model, cache)
    seen = weakref.ref(cache)
    del cache
    gc.collect()
    assert seen() is None


def test_a_model_explains_its_steps() -> None:
    model = model_of()
    assert explain(model).startswith("0 steps were replayed; the last step was not: no step on")
    cache = PackedCache(model.config, "q8_0/q8_0")

    def step(**given: Any) -> str:
        with torch.no_grad():
            model(input_ids=ids(1, 1), position_ids=torch.tensor([[0]]), **given)
        return explain(model)

    assert "a cache whose layers hold no entries yet" in step(**with_cache(model, cache))
    assert "1 x 1 tokens on cpu: recorded 1 times of 2" in step(**with_cache(model, cache))
    step(**with_cache(model, cache))
    lines = step(**with_cache(model, cache)).splitlines()
    assert lines[0] == "1 steps were replayed; the last step was, too"
    assert "2 metalmm::attention" in lines[1]
    assert "a call without a PackedCache" in step()
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    assert "the model's own, model.norm has a hook" in step(**with_cache(model, cache))
    handle.remove()
    with pytest.raises(ValueError, match="model: Linear records no steps"):
        explain(torch.nn.Linear(1, 1))


def test_a_weight_in_another_part_of_its_memory_is_seen() -> None:
    model = model_of()
    weight, cache = model.model.norm.weight, PackedCache(model.config, "q8_0/q8_0")
    bank = torch.stack([weight.detach(), 2 * weight.detach()])
    steps = steps_of(model)
    with emulated():
        weight.data = bank[0]
        stepped(model, model, cache)
        replays, weight.data = steps.replays, bank[1]
        stepped(model, model, cache)
    assert replays > 0
    assert steps.replays < replays + STEPS  # the first of them is the model's own


def test_a_mask_for_each_kind_of_layer_is_the_models_own() -> None:
    model = fused("gemma3_text", "f16", head_dim=32)
    steps, found = steps_of(model), []
    masks = {"full_attention": None, "sliding_attention": None}
    for forward in (model, steps.original):
        cache = PackedCache(model.config, "f16")
        with torch.no_grad():
            forward(input_ids=ids(1, 3), **with_cache(model, cache))
            given = {"attention_mask": masks, **with_cache(model, cache)}
            found.append(forward(input_ids=ids(1, 1), **given).logits)
    assert torch.equal(*found)
    assert steps.why == "an attention_mask for each kind of layer"

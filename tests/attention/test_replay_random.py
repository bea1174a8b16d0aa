"""Random steps with changes between them: whatever happens, the next is the model's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backends import CASES as HOW_MANY
from layer_models import ids, layers
from replay_pair import HYBRID, KINDS, Pair, fused, on, steps_of, unfused
from torch import Tensor, nn

from torch_metalmm.models.cache_argument import with_cache


class _Added(nn.Module):
    """A layer with an addend, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + 0.5 * y.flip(-1)


def _adapter(model: Any, i: int) -> None:
    head = model.lm_head
    model.lm_head = head.inner if isinstance(head, _Added) else _Added(head)


def _twice(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def _hook(model: Any, i: int) -> None:
    """One that changes the head's output, until the next time."""
    handle = vars(model).pop("_handle", None)
    if handle is not None:
        handle.remove()
    else:
        model._handle = model.lm_head.register_forward_hook(_twice)


def _dtype(model: Any, i: int) -> None:
    model.to(torch.bfloat16 if model.dtype == torch.float32 else torch.float32)


OF_MODELS: dict[str, Callable[[Any, int], Any]] = {
    "weight": lambda m, i: layers(m)[1].input_layernorm.weight.data.mul_(1.25),
    "eps": lambda m, i: unfused(m, 1, 0.01 * i),
    "hook": _hook,
    "adapter": _adapter,
    "dtype": _dtype,
}


@contextmanager
def _kept(model: Any) -> Iterator[None]:
    """Behind it the model is what it was."""
    norm = layers(model)[1].input_layernorm
    weight, numbers = norm.weight.detach().clone(), dict(vars(norm))
    try:
        yield
    finally:
        if "_handle" in vars(model):
            _hook(model, 0)
        if isinstance(model.lm_head, _Added):
            _adapter(model, 0)
        model.float()
        norm.weight.data.copy_(weight)
        vars(norm).update(numbers)


def _repeat(pair: Pair, cache: Any, i: int) -> None:
    if pair.batch < 3:
        cache.batch_repeat_interleave(2)


# Of both caches. A state cannot go back, so that those of a hybrid refuse a crop.
OF_CACHES: dict[str, Callable[[Pair, Any, int], Any]] = {
    "crop": lambda pair, cache, i: cache.crop(-(i % 2)),
    "reorder": lambda pair, cache, i: cache.reorder_cache(torch.arange(pair.batch - 1, -1, -1)),
    "repeat": _repeat,
    "select": lambda pair, cache, i: cache.batch_select_indices(torch.tensor([0])),
}


def _failing(pair: Pair) -> None:
    """A step of tokens that there are not, by the replayed model and by the other."""
    tokens = torch.full((pair.batch, 1), 10**6)
    for forward, cache in zip((pair.model, pair.steps.original), pair.caches, strict=True):
        with torch.no_grad(), pytest.raises(IndexError):
            forward(input_ids=tokens, **with_cache(pair.model, cache))


def _interrupted(pair: Pair) -> None:
    """A step that ends behind its layers, in both."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = pair.model.lm_head.register_forward_pre_hook(stop)
    tokens = ids(pair.batch, 1).to(pair.model.device)
    for forward, cache in zip((pair.model, pair.steps.original), pair.caches, strict=True):
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            forward(input_ids=tokens, **with_cache(pair.model, cache))
    handle.remove()


def _masked(pair: Pair, count: int) -> dict[str, Any]:
    rows = pair.caches[0].get_seq_length() + count
    mask = torch.ones(pair.batch, rows, dtype=torch.long, device=pair.model.device)
    return {"attention_mask": mask}


def _hidden(pair: Pair, count: int) -> dict[str, Any]:
    given = _masked(pair, count)
    given["attention_mask"][0, 0] = 0
    return given


def _placed(pair: Pair, count: int) -> dict[str, Any]:
    first = pair.caches[0].get_seq_length() + pair.batch
    positions = torch.arange(first, first + count, device=pair.model.device)
    return {"position_ids": positions.expand(pair.batch, -1)}


OF_STEPS: dict[str, Callable[[Pair, int], dict[str, Any]]] = {
    "mask": _masked,
    "hidden": _hidden,
    "positions": _placed,
    "logits": lambda pair, count: {"logits_to_keep": 1},
}


def _sequence(model: Any, kind: str, engine: str, r: random.Random) -> None:
    formats = ("q8_0/q8_0",) if kind == HYBRID else ("f16", "f32", "q8_0/q8_0")
    pairs = [Pair(model, r.choice(formats), r.choice((1, 2))) for _ in range(r.choice((1, 1, 2)))]
    for pair in pairs:
        pair.step(r.randrange(2, 70 if engine == "cpu" else 20))
    acts = [*OF_MODELS, *OF_CACHES, *OF_STEPS, "failing", "interrupted"]
    if engine != "cpu":
        acts.remove("failing")  # a GPU's kernels do not say that there is no such token
    if kind == HYBRID:  # whose states no act below undoes, and whose f32 alone is fused
        acts = [*set(acts) - {*OF_CACHES, "dtype", "failing", "interrupted", "hidden"}]
    for i in range(12):
        act, pair, given = r.choice((*acts, *[""] * 3 * len(acts))), r.choice(pairs), {}
        count = r.choice((1, 1, 1, 1, 1, 2))
        if act in OF_MODELS:
            OF_MODELS[act](model, i)
        elif act in OF_CACHES:
            for cache in pair.caches:
                OF_CACHES[act](pair, cache, i)
            pair.batch = pair.caches[0].layers[0].keys.shape[0]
        elif act in OF_STEPS:
            given = OF_STEPS[act](pair, count)
        elif act:
            {"failing": _failing, "interrupted": _interrupted}[act](pair)
        pair.step(count, seed=i, **given)


# {engine: sequences, usually and with METALMM_TEST_CASES=all}
COUNTS = {"cpu": (24, 10_000), "emulator": (4, 50), "cuda": (24, 400)}


@pytest.mark.parametrize("engine", COUNTS)
def test_random_steps_with_changes(engine: str) -> None:
    if engine == "cuda" and not torch.cuda.is_available():
        pytest.skip("no such device")
    models = {kind: fused(kind) for kind in (*KINDS, HYBRID)}
    if engine == "cuda":
        models = {kind: model.to("cuda") for kind, model in models.items()}
    count = COUNTS[engine][HOW_MANY == "all"]
    for number in range(count):
        r = random.Random(number)
        kind = r.choice([*models])
        with _kept(models[kind]), on(engine):
            try:
                _sequence(models[kind], kind, engine, r)
            except AssertionError as error:
                error.add_note(f"sequence {number}, {kind}")
                raise
    replays = sum(steps_of(model).replays for model in models.values())
    assert replays > count

"""The time of a token: a case by hand, its properties, and the page."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from bench.__main__ import main
from bench.models import llamas, shares
from bench.models.systems import Transformers
from bench.shaders import chips
from bench.tables import read_block
from torch_metalmm import PackedCache
from torch_metalmm.tools import token_time as model
from torch_metalmm.tools.cost_model import Chip, predict
from torch_metalmm.tools.token_time import FORMS, MODELS, Model, token_time

SMALL = Model(4096, 2, 14336, 32000, 32, 8)


def test_a_token_by_hand() -> None:
    """Two fused layers on an M4 Max: 5 passes and 3 kernels of torch each, 3 and 12 beside them."""
    t = token_time(SMALL, "q4_0", "m4-max", "fused", context=100)
    sizes = ((6144, 4096, 2), (28672, 4096, 2), (4096, 4096, 2), (4096, 14336, 2), (32000, 4096, 1))
    memory = sum(times * predict(1, n, k, "q4_0", "m4-max").memory for n, k, times in sizes)
    assert t.products == pytest.approx(memory, rel=1e-12)  # each of them is bound by memory
    assert (t.passes, t.others) == (2 * 5 + 3, 2 * 3 + 12)
    assert t.attention == pytest.approx(3 * 2 * 2 * 100 * 2 * 1024 / (546e3 * 0.9))
    assert t.gpu == pytest.approx(t.products + t.attention + 2.0 * 13 + 2.5 * 18)
    assert t.host == pytest.approx(2 * model.LAYER_US["fused"] + 15 * 18 + 0.5 * 13)
    assert t.total == t.beside + max(t.gpu, t.host) and t.bound == "GPU"


@pytest.mark.parametrize(
    ("cache", "rows"),
    [("f16", 2 * 256), ("q8_0", 256 + 136), ("q4_0", 256 + 72), ("q8_0/q4_0", 136 + 72)],
)
def test_a_cache_by_hand(cache: str, rows: int) -> None:
    """Its bytes once; two passes of attention, and one that appends where no rotation does."""
    without = token_time(SMALL, "q4_0", "m4-max", "fused", context=8192)
    t = token_time(SMALL, "q4_0", "m4-max", "fused", context=8192, cache=cache)
    assert t.attention == pytest.approx(2 * 8 * 8192 * rows / (546e3 * 0.9))
    assert (t.passes, t.others) == (without.passes + 2 * 2, without.others - 2 * 3)
    plain = token_time(SMALL, "q4_0", "m4-max", "unfused", context=8192)
    unfused = token_time(SMALL, "q4_0", "m4-max", "unfused", context=8192, cache=cache)
    assert (unfused.passes, unfused.others) == (plain.passes + 2 * 3, plain.others - 2 * 3)
    assert t.total < without.total and unfused.total < plain.total


@pytest.mark.parametrize("name", MODELS)
def test_forms_are_in_order(name: str) -> None:
    """On every chip; and a slower host is never faster."""
    for chip in chips.CHIPS:
        unfused, fused, replayed, gpu = (token_time(name, "q4_k", chip, form) for form in FORMS)
        assert unfused.total > fused.total > gpu.total > gpu.products == fused.products
        assert fused.total > replayed.total >= replayed.gpu > replayed.products == fused.products
        assert unfused.passes > fused.passes and unfused.others > fused.others
    hosts = [token_time(name, "q4_k", "m4-max", "unfused", us).total for us in (1.0, 10.0, 40.0)]
    assert hosts == sorted(hosts)


def test_kernels_are_those_of_a_step() -> None:
    """What is assumed of an unfused Llama in f16 is what is counted of one."""
    shape = replace(llamas.SHAPES["tiny"], kv_heads=2)
    counted = []
    with torch.inference_mode():
        for layers in (1, 3):
            source = replace(shape, layers=layers)
            packed: Any = llamas.packed_llama(source, "q4_0", "cpu", torch.float16)
            system = Transformers("", packed)
            system.feed([1, 2])
            kinds = [c.kind for c in shares.watched(lambda s=system: s.feed([1]))]
            counted.append(sum(kind in ("attention", "others") for kind in kinds))
    one = Model(256, 1, 512, 512, 4, 2, 64)
    assert (counted[1] - counted[0]) / 2 == one.other_kernels(False) - model._BESIDE["unfused"]
    assert abs(counted[0] - one.other_kernels(False)) <= 6


def test_a_replayed_token_by_hand() -> None:
    """7 passes a layer, 4 beside them; the host goes on while the GPU computes."""
    t = token_time(SMALL, "q4_0", "m4-max", "replayed", context=100)
    cached = token_time(SMALL, "q4_0", "m4-max", "fused", context=100, cache="f16")
    assert (t.products, t.attention) == (cached.products, cached.attention)
    assert (t.passes, t.others) == (2 * 7 + 4, 8)
    assert t.host == pytest.approx(60 + 2 * 3.4 + 15 * 8 + 0.5 * 18)
    assert t.total == max(t.gpu, t.host)


def test_fewer_cores_are_planned_for() -> None:
    small = replace(Chip.named("m4-max"), cores=32, bandwidth_gb_s=410)
    assert token_time(SMALL, "q4_0", small).total > token_time(SMALL, "q4_0", "m4-max").total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Llama 9", "q4_0", "m1"), "model: unknown 'Llama 9'; allowed: Llama 2 7B, "),
        (
            (SMALL, "q4_0", "m1", "faster"),
            "form: unknown 'faster'; allowed: unfused, fused, replayed, gpu",
        ),
    ],
)
def test_what_is_unknown_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_time(*arguments)


def test_a_step_with_a_cache_is_what_is_counted() -> None:
    """The kernels of torch that a PackedCache leaves in an unfused Llama's layer."""
    shape, counted = replace(llamas.SHAPES["tiny"], kv_heads=2), []
    with torch.inference_mode():
        for layers in (1, 3):
            packed: Any = llamas.packed_llama(
                replace(shape, layers=layers), "q4_0", "cpu", torch.float16
            )
            make = partial(PackedCache, packed.config, "q8_0")
            system = Transformers("", packed, False, make=make, attention="metalmm")
            system.reset()
            system.feed([1, 2, 3])
            calls = shares.watched(lambda s=system: s.feed([1]))
            calls = [c for c in calls if c.name != "aten::arange"]  # slots, of all layers alike
            counted.append([c.kind for c in calls] + [c.name for c in calls])
    others, attention, appends = (
        (counted[1].count(what) - counted[0].count(what)) / 2
        for what in ("others", "attention", "metalmm::cache_append")
    )
    one = Model(256, 1, 512, 512, 4, 2, 64)
    in_layer = one.other_kernels(False, is_packed=True) - model._BESIDE["unfused"]
    assert (others, attention, appends) == (in_layer, 1, 1)


def test_contexts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "--tokens", "--context", "128,8k", "--cache", "q8_0"]) == 0
    head, _, *rows = capsys.readouterr().out.split("\n\n")[1].strip().splitlines()
    assert head == "| model, cache | 128 tokens | 8192 tokens |"
    assert len(rows) == 2 * len(chips.SHOWN) and "PackedCache f16/q8_0" in rows[1]


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chips", "--tokens"]) == 0
    printed = capsys.readouterr().out
    assert printed == read_block(chips.TOKENS_PAGE, chips.TOKENS_COMMAND) + "\n"

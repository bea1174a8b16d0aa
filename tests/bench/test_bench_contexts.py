"""`python -m bench tokens --cache`: caches that are filled, compared, timed, and taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measured import records_of
from torch import Tensor
from transformers import DynamicCache

from bench.devices import CPU
from bench.models import contexts, llamas
from bench.models.contexts import error_after
from bench.models.systems import PIECE, Static, Transformers, counts, random_rows
from bench.models.tokens import Entry, Reference
from bench.peers.programs import CHUNK, LlamaCpp
from torch_metalmm import PackedCache, fuse_

pytestmark = pytest.mark.usefixtures("own_threads")

TINY = llamas.SHAPES["tiny"]


@pytest.fixture(scope="module")
def source() -> llamas.Source:
    return llamas.source("tiny", "cpu", torch.float32)


@pytest.fixture(scope="module")
def packed(source: llamas.Source) -> Any:
    return source.packed("q4_0")


def test_every_cache_is_checked_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After each context; exact formats to the bits of f32, others within what they round."""
    choice = ("--cache", "f32,q8_0", "--formats", "q4_0", "--new-tokens", "2", "--no-peers")
    found = [r for r in records_of(tmp_path, "tokens", *choice) if r["kind"] == "context"]
    assert [r["context"] for r in found] == [24] * 4 + [40] * 4
    dense, dynamic, exact, rounded = found[4:]
    assert [r["system"] for r in found[:4]] == [r["system"] for r in found[4:]]
    assert exact["system"] == "metalmm q4_0, fuse_, PackedCache f32"
    assert max(r["error"] for r in found[4:]) < 1e-3
    assert max(dense["error"], dynamic["error"], exact["error"]) < 1e-5
    assert all(r["ok"] and r["ms"] > 0 for r in found) and "gain" not in dynamic
    assert exact["gain"] > 0 and rounded["attention_launches"] == TINY.layers
    assert "packed_launches" not in found[0] and dense["packed_launches"] == 0
    assert "ms after 24" in capsys.readouterr().out


def test_rows_do_not_depend_on_where_a_context_ends(packed: Any) -> None:
    like = torch.empty(0)
    whole = random_rows(packed.config, 1, 0, PIECE + 9, like)
    parts = [random_rows(packed.config, 1, a, b, like) for a, b in ((0, 5), (5, PIECE + 9))]
    for name, tensor in enumerate(whole):
        assert tensor.shape == (1, TINY.kv_heads, PIECE + 9, 64)
        assert torch.equal(tensor, torch.cat([part[name] for part in parts], 2))
    other = random_rows(packed.config, 0, 0, PIECE + 9, like)
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(whole[0], other[0])


def make_caches(model: Any) -> dict[str, Transformers]:
    caches = {"sdpa": DynamicCache, "metalmm": lambda: PackedCache(model.config, "f32")}
    return {n: Transformers(n, model, make=make, attention=n) for n, make in caches.items()}


def test_a_sequence_goes_on_after_a_round(packed: Any) -> None:
    """Rewound, a system gives the logits that it gave before; systems share a model by turns."""
    for system in make_caches(fuse_(packed)).values():
        system.extend(20)
        first = system.feed([3])
        system.feed([4])
        system.rewind(2)
        assert torch.equal(system.feed([3]), first)
        system.rewind(1)
        system.extend(30)
        assert system.cache.get_seq_length() == 30
        assert not torch.equal(system.feed([3]), first)


def test_a_round_calls_the_attention_of_its_system(packed: Any) -> None:
    systems = make_caches(packed)
    for system in (*systems.values(), systems["sdpa"]):
        system.begin()
        assert packed.config._attn_implementation == system.name


def test_caches_of_constant_size(packed: Any) -> None:
    """What a graph captures, here step by step: the logits of a cache that grows."""
    makers = {"sdpa": None, "metalmm": contexts.packed_cache(packed, "f32")}
    for attention, make in makers.items():
        growing = make_caches(packed)["sdpa"]
        system = Static("", packed, length=4, make_sized=make, attention=attention)
        for context in (20, 33):
            growing.extend(context)
            wanted = growing.feed([3])
            growing.rewind(1)
            system.extend(context)
            assert counts(system.cache)[0].max() == context
            for other in (5, 7):  # another token's row is overwritten
                system.feed([other])
                system.rewind(1)
                torch.testing.assert_close(system.feed([3]), wanted)
                system.rewind(1)


def test_a_wrong_cache_is_found(source: llamas.Source, packed: Any) -> None:
    """Rows of another layer: the error is none of rounding."""
    wanted, entry = Reference(source), Entry(make_caches(packed)["sdpa"], packed)
    assert error_after(wanted, entry, 20) < 1e-5
    entry.system.cache.layers.reverse()
    assert error_after(wanted, entry, 20) > 1e-3


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("name", ["q4_0", "f16"])
def test_rounding_of_a_cache_is_no_error(
    source: llamas.Source, packed: Any, name: str, is_large: bool
) -> None:
    """Compared are the same rounded rows; a cache of another format is wrong."""
    wanted = Reference(replace(source, is_large=is_large))
    for held, most in ((name, 1e-3), ("q5_0", None)):
        make = partial(PackedCache, packed.config, held)
        system = Transformers("", packed, False, make=make, attention="metalmm", format=name)
        error = error_after(wanted, Entry(system, packed), 30)
        assert error < most if most else error > 1e-3


class Prompted(LlamaCpp):
    """llama.cpp as the benchmark calls it."""

    name, vocabulary, held = "p", 99, 0

    def __init__(self, *_: Any) -> None:
        self.tokens: list[int] = []

    def reset(self) -> None:
        self.tokens = []

    def feed(self, tokens: Sequence[int]) -> Tensor:
        assert len(tokens) <= CHUNK
        self.tokens += tokens
        return torch.zeros(self.vocabulary)

    def forget(self, first: int) -> None:
        del self.tokens[first:]


def test_a_prompt_is_evaluated_once() -> None:
    """Where there are no rows to give: the contexts share what they begin with."""
    system = Prompted()
    system.extend(700)
    first = list(system.tokens)
    system.feed([1, 2])
    system.rewind(2)
    system.extend(2048)
    assert len(system.tokens) == 2048 and system.tokens[:700] == first


def test_llama_cpp_takes_the_cache_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """f16 and those of --cache that ggml has; a run without llama.cpp says so."""
    made: list[Any] = []

    class Loaded(Prompted):
        def __init__(self, *where: Any) -> None:
            made.append(where[-1])

        @staticmethod
        def missing(format: str, device: str) -> str | None:
            return "not here" if made else None

    monkeypatch.setattr(contexts, "LlamaCpp", Loaded)
    source: Any = SimpleNamespace(vocabulary=99)
    args = SimpleNamespace(contexts=(8,), new_tokens=2, threads=1, cache=["q8_0", "mxfp4"])
    builder = contexts.ContextBuilder(source, args, CPU, torch.float32, Path())
    entries = [*builder.llama_cpp("q4_0", torch.nn.Module())]
    assert made == ["f16", "q8_0"] and len(entries) == 2
    assert [*builder.llama_cpp("q4_0", torch.nn.Module())] == []
    assert builder.skipped[0]["what"] == "llama.cpp q4_0"

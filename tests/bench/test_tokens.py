"""`python -m bench tokens`: what is counted, to whom time is given, what is printed."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measured import records_of

from bench.devices import Device
from bench.models import llamas, shares
from bench.models.systems import Packed, Static, Transformers
from bench.models.tokens import Builder, Entry, Race
from bench.options import parse
from bench.peers.programs import CHUNK, LlamaCpp, MlxLm
from bench.report import model_tables
from torch_metalmm import _C, QuantLinear, formats
from torch_metalmm.nn.activations import set_activations

pytestmark = pytest.mark.usefixtures("own_threads")

TINY = llamas.SHAPES["tiny"]
PRODUCTS = 7 * TINY.layers + 1  # of packed weights in a step, unfused


@pytest.fixture(scope="module")
def packed() -> Any:
    return llamas.source("tiny", "cpu", torch.float32).packed("q4_0")


def test_a_token_by_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both forms of a packed model and the dense ones: checked, timed, and taken apart."""
    options = ["--formats", "q4_0", "--no-peers", "--new-tokens", "1", "--markdown"]
    found = records_of(tmp_path, "tokens", *options)
    cells = {r["system"]: r for r in found if r["kind"] == "tokens"}
    dense, bf16, plain, fused, _ = cells.values()
    names = ["metalmm q4_0", "metalmm q4_0, fuse_", "metalmm q4_0, fuse_, replayed"]
    assert [*cells][2:] == names
    assert all(r["ok"] and r["ms"] > 0 for r in cells.values())
    assert dense["packed_launches"] == bf16["packed_launches"] == dense["passes"] == 0
    assert plain["packed_launches"] == PRODUCTS and plain["passes"] == PRODUCTS + 1
    assert plain["ops"]["metalmm::embedding"] == plain["ours_launches"] == 1
    assert fused["packed_launches"] < plain["packed_launches"] and fused["gain"] > 0
    assert plain["packed_ms"] > 0 and plain["attention_launches"] == TINY.layers
    printed = capsys.readouterr().out
    assert "2 M parameters: ms of a token" in printed and "attn ms" in printed


def test_caches_after_several_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A system for each format of a cache; each context has its rounds and its table."""
    rounds, round_of = list[int](), Race.round

    def counted(race: Race, prompt: Any, context: int, new_tokens: int) -> None:
        rounds.append(context)
        round_of(race, prompt, context, new_tokens)

    monkeypatch.setattr(Race, "round", counted)
    choice = ("--cache", "f32,q8_0/q8_0", "--context", "8,60", "--new-tokens", "1", "--no-peers")
    found = records_of(tmp_path, "tokens", *choice, "--formats", "q4_0")
    cells = [r for r in found if r["kind"] == "tokens"]
    names = [f"metalmm q4_0, fuse_, cache {c}, replayed" for c in ("f32", "q8_0/q8_0")]
    assert [r["system"] for r in cells][5:7] == names == [r["system"] for r in cells][12:]
    assert [r["context"] for r in cells] == [8] * 7 + [60] * 7 and cells[0]["prompt"] == 60
    assert [*dict.fromkeys(rounds)] == [8, 60]
    assert cells[5]["error"] < 1e-5 < cells[6]["error"] < 1e-2 and all(r["ok"] for r in cells)
    printed = capsys.readouterr().out
    assert "parameters, after 8" in printed and "ms of a token after 60" in printed


def test_layers_of_tiny_weights(tmp_path: Path) -> None:
    """A layer has 7 products; formats whose block is longer than the layers are left out."""
    found = records_of(tmp_path, "tokens", "--overhead", "--formats", "q4_0,q4_k", "--no-fuse")
    dense, packed = [r for r in found if r["kind"] == "layers"]
    assert dense["our_ops"] == 0 and packed["our_ops"] == 7
    assert dense["other_ops"] == packed["other_ops"] + 7
    assert packed["ops_us"] > 0 and packed["system"] == "metalmm q4_0"


def test_a_cache_of_constant_size_gives_the_same_logits(packed: Any) -> None:
    growing, static = Transformers("a", packed), Static("b", packed)
    for system in (growing, static, static):
        system.reset()
        system.feed(range(5))
        system.feed([6])
    torch.testing.assert_close(growing.feed([7]), static.feed([7]))


def test_a_packed_cache_gives_the_same_logits(packed: Any) -> None:
    growing, cached = Transformers("a", packed), Packed("b", copy.deepcopy(packed))
    for system in (growing, cached):
        system.feed(range(5))
    given, wanted = cached.feed([7]), growing.feed([7])
    torch.testing.assert_close(given, wanted)
    cached.reset()
    cached.feed(range(1, 6))
    assert not torch.equal(cached.feed([7]), given)  # the rows of before are gone


def test_only_a_growing_cache_is_captured(packed: Any) -> None:
    """The graph has a static cache, under the name of the system that it is made of."""
    args = SimpleNamespace(contexts=(32,), new_tokens=4, no_graph=False)
    builder: Any = SimpleNamespace(args=args, device=Device("cuda"))
    made = [of("a", copy.deepcopy(packed)) for of in (Transformers, Packed)]
    entries = [Entry(system, packed) for system in made]
    *given, graph = Builder.and_graphs(builder, entries)
    assert given == entries
    assert graph.system.name == "a, graph" and graph.system.model is entries[0].system.model


def test_the_defaults_of_a_device() -> None:
    """A GPU takes large models, and the formats that are compared there; --quick a tiny one."""
    args = parse(["tokens", "--device", "cuda"])
    assert (args.models, args.formats) == ("8b,1b", "q4_0,q4_k,affine4_g64")
    assert args.context == "128" and parse(["tokens", "--device", "cpu"]).context == "32"
    assert parse(["tokens", "--device", "cuda", "--models", "1b"]).models == "1b"
    assert parse(["tokens", "--device", "cuda", "--quick"]).models == "tiny"
    assert set(parse(["tokens", "--device", "cpu"]).models.split(",")) < set(llamas.NAMES)
    with pytest.raises(ValueError, match="model '7b'; must be of tiny, "):
        llamas.source("7b", "cpu", torch.float32)


def test_what_computes_is_counted() -> None:
    """Views do not; to, reshape and contiguous do where they copy."""
    x = torch.ones(4, 6)

    def step() -> None:
        x.t().reshape(-1)
        x.reshape(-1).to(torch.float32)
        x.to(torch.float16).contiguous()
        torch.empty(3)
        torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)

    kinds = [call.kind for call in shares.watched(step) if call.kind]
    assert kinds == ["others", "others", "attention"]


def test_passes_are_those_of_the_chip(packed: Any) -> None:
    """Recorded for a chip that is not here; a product of few rows and many values is split."""
    layer = QuantLinear.from_packed(
        torch.zeros(64, formats.get("q4_0").row_bytes(16384), dtype=torch.uint8), 16384, "q4_0"
    )
    calls = shares.watched(lambda: layer(torch.zeros(1, 16384)))
    plan = _C.plan(m=1, n=64, k=16384, format="q4_0", dtype="f32", chip="m4-max")
    assert shares.recorded_passes(calls, "m4-max") == len(plan["passes"])
    set_activations(layer, "int8")  # of the CPU: a chip has no other than exact ones
    calls = shares.watched(lambda: layer(torch.zeros(1, 16384)))
    assert shares.recorded_passes(calls, "m4-max") == len(plan["passes"])
    assert layer(torch.zeros(1, 16384)).abs().max() == 0  # the CPU's kernels are back


def test_kernels_of_a_trace() -> None:
    """Kernels by name; the ops that launched them do not count."""
    kernels = {
        "gemv_q4_0_f16": "packed",
        "swiglu_up_q4_k_f16": "packed",
        "split_reduce_f16": "packed",
        "embedding_q4_0_f16": "ours",
        "attention_parts_q8_0_f16": "attention",
        "void pytorch_flash::flash_fwd_splitkv_kernel<...>": "attention",
        "fmha_cutlassF_f16_aligned_64x128_rf_sm80": "attention",
        "void at::native::elementwise_kernel<128, 4, ...>": "others",
        "gemv2T_kernel_val": "others",
    }
    events = [{"cat": "kernel", "name": n, "dur": 2.0, "ts": 0.0} for n in kernels] * 2
    events += [{"cat": "cpu_op", "name": "aten::add", "dur": 90.0, "ts": 0.0, "tid": 1}]
    events += [{"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 2.0, "ts": 0.0}, {"name": "x"}]
    assert {n: shares.kind_of_kernel(n) for n in kernels} == kernels
    found = shares.of_trace(events, steps=2)
    assert found.launches == {"packed": 3, "ours": 1, "attention": 3, "others": 2}
    assert found.seconds == pytest.approx(
        {"packed": 6e-6, "ours": 2e-6, "attention": 6e-6, "others": 5e-6}
    )


def test_an_interrupted_step_does_not_count() -> None:
    """Three steps alike, of which one waits; as many events as steps need not be there."""
    names, times = ("gemv_q4_0_f16", "other"), (1.0, 2.0, 1.0, 90.0, 1.0, 2.0)
    events = [
        {"cat": "kernel", "name": names[i % 2], "ts": 100.0 * i, "dur": times[i]} for i in range(6)
    ]
    found = shares.of_trace(reversed(events), steps=3).seconds
    assert (found["packed"], found["others"]) == pytest.approx((1e-6, 2e-6))
    found = shares.of_trace(events[:4], steps=3).seconds
    assert found["others"] == pytest.approx(92e-6 / 3)


def test_a_large_model_is_made_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are quantized ones, its logits finite, and the same each time."""
    monkeypatch.setattr(llamas, "LARGE", 0)
    source = llamas.source("tiny", "cpu", torch.float16)
    logits = [Transformers("", source.packed("q4_k")).feed([1, 2, 3]) for _ in range(2)]
    assert source.is_large and torch.equal(*logits) and bool(logits[0].isfinite().all())
    model = source.packed("affine4_g64")
    assert {m.format for m in model.modules() if isinstance(m, QuantLinear)} == {"affine4_g64"}
    assert sum(p.numel() for p in source.dense(torch.float16).parameters()) == TINY.parameters


def test_a_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The others run, and the run says which did not."""

    def missing() -> Path:
        raise FileNotFoundError("no demo model: pip install it")

    monkeypatch.setattr(llamas, "demo_model", missing)
    found = records_of(tmp_path, "tokens", "--models", "smollm2")
    assert found[1:] == [{"kind": "skipped", "what": "smollm2", "why": "pip install it"}]


def test_peers_say_why_they_do_not_run() -> None:
    assert MlxLm.missing("q4_0", "cpu") == "MLX has no such format"
    assert "CPU" in (MlxLm.missing("affine4_g64", "cuda") or "")
    assert LlamaCpp.missing("affine4_g64", "cpu")


def test_llama_cpp_takes_a_prompt_in_parts() -> None:
    taken, logits = list[list[int]](), (ctypes.c_float * 2)(0.5, 1.5)
    system: Any = object.__new__(LlamaCpp)
    system.vocabulary, system.context = 2, 0
    system.api = SimpleNamespace(
        llama_batch_get_one=lambda ids, count: [*ids][:count],
        llama_decode=lambda context, batch: taken.append(batch),
        llama_get_logits_ith=lambda context, i: logits,
    )
    assert system.feed(range(CHUNK + 3)).tolist() == [0.5, 1.5]
    assert [*map(len, taken)] == [CHUNK, 3] and sum(taken, []) == [*range(CHUNK + 3)]


def test_tables_of_a_peer_without_parts() -> None:
    """A peer has times alone; a graph on a GPU has no passes."""
    rates = dict.fromkeys(("decode", "prefill"), 2.0)
    rates |= {f"{name}_{q}": 1.0 for name in rates for q in ("q1", "q3")}
    peer = {"kind": "tokens", "model": "m", "system": "a", "prompt": 8, "context": 32}
    peer |= rates | {"weight_bytes": 1e6, "ok": True, "error": 1e-3}
    found = shares.Shares(dict.fromkeys(shares.KINDS, 1e-3), dict.fromkeys(shares.KINDS, 2))
    other = peer | found.record() | {"ms": 3.0, "ms_q1": 2.0, "ms_q3": 4.0}
    other |= {"host_ms": 1.0, "device": "cuda"}
    first, second = model_tables([peer, other])
    assert [row[0] for row in first.rows] == ["a", "a"]
    assert second.rows == [["a", "3.00", "2.00–4.00", *["1.00"] * 5, *["2"] * 4]]

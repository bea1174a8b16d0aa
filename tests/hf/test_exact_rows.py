"""Steps of several rows whose bits are those of single ones: what drafts are verified by."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_models import CASES, family_pair, ids, small
from replay_pair import on, steps_of
from torch import Tensor

from torch_metalmm import PackedCache, activations_, formats, fuse_
from torch_metalmm.formats.activations import TOP_CODES
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.nn.exact import MOST, exact_rows

# {architecture: (heads of keys, format of W, of the cache, how the MLP is fused, others)}
MODELS: dict[str, tuple[int, str, str, str, dict[str, Any]]] = {
    "llama": (2, "q4_0", "q8_0/q8_0", "swiglu", {}),
    "qwen3": (1, "q4_k", "q4_0/q4_0", "swiglu_linear", {}),
    "gemma3_text": (2, "q8_0", "f16/q8_0", "swiglu", {"sliding_window": 24}),
    "phi3": (4, "q6_k", "f32", "swiglu", {}),
    "starcoder2": (2, "affine4_g64", "q8_0/q8_0", "swiglu", {}),
}


def model_of(kind: str, dtype: torch.dtype, count: int) -> tuple[Any, str]:
    heads, format, cache, form, others = MODELS[kind]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": heads}
    heads_of = {} if kind in ("phi3", "starcoder2") else {"head_dim": 64}
    model = small(kind, format, dtype, num_hidden_layers=count, **sizes, **heads_of, **others)
    return fuse_(model, form, cache=cache), cache


def stepped(model: Any, cache: str, prompt: Tensor, rest: Tensor, count: int) -> Tensor:
    """Logits of the rest, so many tokens a step."""
    held, found, done = PackedCache(model.config, cache), list[Tensor](), 0
    given = {"use_cache": True, **with_cache(model, held)}
    with torch.no_grad():
        for part in (prompt, *rest.split(count, 1)):
            # Bamba, asked without positions, counts from 0 in each step.
            positions = torch.arange(done, done + part.shape[1])[None]
            with exact_rows(count > 1 and done > 0):
                out = model(input_ids=part, position_ids=positions, **given)
            found.append(out.logits)
            done += part.shape[1]
    return torch.cat(found[1:], 1)


RUNS = [("cpu", kind, torch.float32) for kind in MODELS]
RUNS += [("cpu", "llama", torch.bfloat16), ("cpu", "qwen3", torch.float16)]
RUNS += [("emulator", "llama", torch.float16), ("emulator", "gemma3_text", torch.float32)]
RUNS += [("emulator", "qwen3", torch.float16)]


@pytest.mark.parametrize(("engine", "kind", "dtype"), RUNS)
def test_rows_of_a_step_have_the_bits_of_single_steps(
    engine: str, kind: str, dtype: torch.dtype
) -> None:
    # Of the emulator a prompt after which the steps reach the second of two parts of 64 slots.
    emulates = engine == "emulator"
    length, steps, counts = (62, MOST, (8, 3)) if emulates else (300, 2 * MOST, (2, 3, 4, 5, 8))
    # Those of gemma3 are of two kinds.
    layers = 1 if emulates and kind != "gemma3_text" else 2
    model, cache = model_of(kind, dtype, layers)
    prompt, rest = ids(1, length), ids(1, steps, seed=1)
    with on(engine):
        want = stepped(model, cache, prompt, rest, 1)
        for count in counts:
            got = stepped(model, cache, prompt, rest, count)
            assert torch.equal(got, want), count


@pytest.mark.parametrize("kind", TOP_CODES)
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_rows_of_rounded_activations(case: str, kind: str) -> None:
    model = activations_(copy.deepcopy(family_pair(case)[1]), kind)
    prompt, rest = ids(1, 20), ids(1, 2 * MOST, seed=1)
    want = stepped(model, "q8_0", prompt, rest, 1)
    for count in (2, 4, 8):
        assert torch.equal(stepped(model, "q8_0", prompt, rest, count), want), count


@pytest.mark.parametrize("case", sorted({*CASES} - {"mamba2"}))
def test_every_family(case: str) -> None:
    """Experts and recurrent layers, too; steps are replayed. A cache of mamba2 counts no rows: it
    has no drafts, and no steps that are recorded."""
    model = family_pair(case)[1]
    prompt, rest = ids(1, 20), ids(1, 2 * MOST, seed=1)
    steps = steps_of(model)
    before = steps.replays
    want = stepped(model, "q8_0", prompt, rest, 1)
    assert steps.replays >= before + MOST
    for count in (2, 4, 8):
        assert torch.equal(stepped(model, "q8_0", prompt, rest, count), want), count


SIZES = [(40, 256), (24, 4096)]  # in the second simdgroups share K of a row (gemv_large_k)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(
    "given", [("cpu", None), *(("cpu", k) for k in TOP_CODES), ("emulator", None)], ids=str
)
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "affine4_g64"])
def test_rows_of_an_op(name: str, given: tuple[str, str | None], n: int, k: int) -> None:
    """Products, with a norm and as gate and up, of every number of rows; one more is another."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(MOST + 1, k, generator=g).to(torch.float16) * 3
    w, u = (formats.get(name).quantize(torch.randn(n, k, generator=g)) for _ in range(2))
    norm = torch.rand(k, generator=g).to(torch.float16)
    ops, (engine, kind) = torch.ops.metalmm, given

    def all_of(rows: Tensor) -> list[Tensor]:
        return [
            ops.linear(rows, w, None, name, activations=kind),
            ops.norm_linear(rows, norm, 1e-6, 0.0, w, None, name, activations=kind),
            ops.swiglu(rows, w, u, name, name, "gelu_tanh", norm, 1e-6, activations=kind),
        ]

    with on(engine):
        alone = [torch.cat(ys) for ys in zip(*(all_of(row[None]) for row in x), strict=True)]
        for count in (2, 3, 5, 8):
            with exact_rows():
                found = all_of(x[:count])
            assert all(torch.equal(a, b[:count]) for a, b in zip(found, alone, strict=True)), count
        plain = all_of(x)
        with exact_rows():
            assert all(map(torch.equal, all_of(x), plain))

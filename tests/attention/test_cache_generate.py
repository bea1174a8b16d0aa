"""Models that generate with a PackedCache, and with the attention function "metalmm"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from backends import Backend
from tiny_models import VOCABULARY, tiny_llama, token_ids
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache
from transformers.masking_utils import (
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from bench.models.families import new_model, sizes
from torch_metalmm import PackedCache, formats, load_gguf
from torch_metalmm.tools.generate import demo_model

pytestmark = pytest.mark.usefixtures("quiet_transformers")

ATTENTION = ("metalmm", "sdpa", "eager")
TOKENS = 10
PACKED = ("q8_0", "q4_0", "affine8_g32", "iq4_nl")
SIZES = sizes(256, 256, VOCABULARY, head_dim=64)


# {kind: its options}: gemma2 has soft caps and windows, gpt_oss sinks.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip


def model_of(kind: str, attention: str = "metalmm", **options: Any) -> Any:
    """A tiny model whose tokens are far apart."""
    model = new_model(kind, SIZES | OPTIONS[kind] | options)
    for layer in model.model.layers if kind == "gpt_oss" else ():
        layer.self_attn.sinks.data.normal_()
    model.get_output_embeddings().weight.data *= 50
    model.set_attn_implementation(attention)
    return model


def generate(model: Any, cache: Any, ids: Tensor, pad: int = 0, **options: Any) -> list[list[int]]:
    """TOKENS of each row of ids; the first row is padded by `pad` tokens on the left."""
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    torch.manual_seed(5)
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        past_key_values=cache,
        **{"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False} | options,
    )
    return out.tolist()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", OPTIONS)
def test_greedy_tokens_are_those_of_dynamic_cache(kind: str, attention: str) -> None:
    """Of the eager model with DynamicCache; caches of f32 and f16, two rows, one of them padded."""
    if attention == "sdpa" and kind in ("gemma2", "gpt_oss"):
        pytest.skip("torch's SDPA has neither soft caps nor sinks")
    ids = token_ids(2, 12)
    reference = model_of(kind, "eager")
    model = model_of(kind, attention)
    for pad in (0, 4):
        want = generate(reference, DynamicCache(config=reference.config), ids, pad)
        assert generate(model, DynamicCache(config=model.config), ids, pad) == want
        for format in (None, "f32", "f16"):
            cache = PackedCache(model.config, format)
            assert generate(model, cache, ids, pad) == want, format
            assert cache.get_seq_length() == 11 + TOKENS


def test_other_ways_to_generate() -> None:
    model = model_of("llama")
    small = tiny_llama(num_hidden_layers=1)
    ids = token_ids(2, 9)
    sampled = {"do_sample": True, "top_k": 20}
    beams = {"num_beams": 3, "num_return_sequences": 2}
    for options in (sampled, beams, sampled | beams):
        want = generate(model, DynamicCache(config=model.config), ids, **options)
        for format in ("f32", "f16"):
            got = generate(model, PackedCache(model.config, format), ids, **options)
            assert got == want, (format, options)
    one = ids[1:]
    greedy = generate(model, DynamicCache(config=model.config), one)
    repeating = torch.cat([one, one, one], 1)
    for options in ({"assistant_model": small}, {"prompt_lookup_num_tokens": 3}):
        assert generate(model, PackedCache(model.config), one, **options) == greedy, options
        want = generate(model, DynamicCache(config=model.config), repeating)
        assert generate(model, PackedCache(model.config), repeating, **options) == want


def forced(model: Any, cache: Any, ids: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Logits of ids, given in parts."""
    out = []
    with torch.inference_mode():
        for part in ids.split(parts, 1):
            out.append(model(part.to(model.device), past_key_values=cache).logits.cpu())
    return torch.cat(out, 1)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "format", [*(f"{f}/{f}" for f in PACKED), "f16/q8_0", "q4_0_rotated/f16", "q8_0/q4_0_rotated"]
)
def test_packed_rows_read_where_they_lie(kind: str, format: str) -> None:
    """As the eager attention function reads them decoded; prompts in parts, and one by one.

    Of one layer, whose keys do not depend on attention: a code that rounds otherwise would.
    """
    ids = token_ids(2, 60)
    parts = (23, 1, 1, 3, 17, 15)
    eager = model_of(kind, "eager", num_hidden_layers=1)
    want = forced(eager, PackedCache(eager.config, format), ids, parts)
    model = model_of(kind, num_hidden_layers=1)
    cache = PackedCache(model.config, format)
    got = forced(model, cache, ids, parts)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    dtypes = [t.dtype for t in (cache.layers[0].keys, cache.layers[0].values)]
    assert dtypes == [formats.DTYPES.get(name, torch.uint8) for name in format.split("/")]
    exact = forced(eager, DynamicCache(config=eager.config), ids, parts)
    assert (got - exact).abs().max() > 1e-4 * exact.abs().max()  # it was packed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_models(dtype: torch.dtype, backend: Backend) -> None:
    """Logits near those of torch's attention, by every engine."""
    ids = token_ids(2, 20)
    parts = (12, 1, 1, 6)
    sdpa = model_of("llama", "sdpa").to(dtype)
    want = forced(sdpa, DynamicCache(config=sdpa.config), ids, parts).float()
    model = model_of("llama").to(dtype).to(backend.device)
    for cache in (DynamicCache(config=model.config), PackedCache(model.config)):
        got = forced(model, cache, ids, parts).float()
        error = (got - want).abs().max() / want.abs().max()
        assert error < (0.02 if dtype == torch.float16 else 0.1)


def test_packed_caches_on_every_engine(backend: Backend) -> None:
    ids = token_ids(1, 16)
    model = model_of("llama").to(backend.device)
    want = forced(model_of("llama", "eager"), DynamicCache(), ids, (9, 1, 6))
    for format, most in (("f32", 1e-4), ("q8_0", 0.05)):
        cache = PackedCache(model.config, format)
        got = forced(model, cache, ids, (9, 1, 6))
        assert (got - want).abs().max() < most * want.abs().max()


def test_a_gradient_is_that_of_torch() -> None:
    """Training falls back: the same loss and gradients as with SDPA, soft caps by the op."""
    ids = token_ids(2, 12)
    for kind, other in (("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")):
        grads = []
        for attention in ("metalmm", other):
            model = model_of(kind, attention).train()
            model(ids, labels=ids).loss.backward()
            grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4 * float(grads[1].abs().max()))


def test_a_cache_with_gradients_is_refused() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="torch.no_grad"):
        model(token_ids(1, 5), past_key_values=PackedCache(model.config))


def test_a_conversation_goes_on() -> None:
    """The cache of one generate() in the next: only new tokens are read."""
    model = model_of("llama")
    first = token_ids(1, 8)
    cache = PackedCache(model.config, "f32")
    said = torch.tensor(generate(model, cache, first))
    asked = torch.cat([said, token_ids(1, 6, seed=3)], 1)
    want = generate(model, DynamicCache(config=model.config), asked)
    assert generate(model, cache, asked) == want
    cache.reset()
    assert generate(model, cache, asked) == want


def test_smollm2() -> None:
    """A real model from its GGUF file: greedy tokens of each cache."""
    model, tokenizer = load_gguf(demo_model())
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    pad = tokenizer.eos_token_id
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": pad}
    want = generate(model, DynamicCache(config=model.config), ids, **options)
    of_metalmm = (("metalmm", format) for format in (None, "f32", "f16", "q8_0"))
    for attention, format in (*of_metalmm, ("sdpa", "f16")):
        model.set_attn_implementation(attention)
        got = generate(model, PackedCache(model.config, format), ids, **options)
        assert "Paris" in tokenizer.decode(got[0])
        assert got == want or format == "q8_0", (attention, format)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("attention", ["metalmm", "eager"])
def test_a_static_cache(kind: str, attention: str) -> None:
    """Of as many slots from the start: the tokens of one that grows."""
    model = model_of(kind, attention)
    ids = token_ids(2, 12)
    for format in (None, "q8_0"):
        cache = PackedCache(model.config, format, slots=40)
        want = generate(model, PackedCache(model.config, format), ids, 4)
        assert generate(model, cache, ids, 4) == want, format
        assert int(cache.get_seq_length()) == 11 + TOKENS and cache.layers[0].keys.shape[2] == 40
        cache.reset()
        assert generate(model, cache, ids, 4) == want, format
    options = {"prompt_lookup_num_tokens": 3}
    want = generate(model, PackedCache(model.config), ids[1:])
    assert generate(model, PackedCache(model.config, slots=60), ids[1:], **options) == want


@pytest.mark.parametrize("cache_of", [DynamicCache, PackedCache])
def test_masks_that_hide_nothing(cache_of: Any) -> None:
    """A token that sees its whole window has none; one of a chunk has, and one beside padding."""
    window = model_of("mistral").config
    chunks = transformers.Llama4TextConfig(attention_chunk_size=8, num_hidden_layers=1)
    chunks._attn_implementation = "metalmm"
    rows = torch.zeros(2, 2, 9, 64)
    made = {}
    for config in (window, chunks):
        cache = cache_of(config=config)
        cache.update(rows, rows, 0)
        is_window = config is window
        create = create_sliding_window_causal_mask if is_window else create_chunked_causal_mask
        for name, padding in (("", None), ("padded", torch.ones(2, 10, dtype=torch.long))):
            if padding is not None:
                padding[0, :5] = 0
            made[is_window, name] = create(
                config=config,
                inputs_embeds=torch.zeros(2, 1, 256),
                attention_mask=padding,
                past_key_values=cache,
            )
    assert made[True, ""] is None
    assert made[True, "padded"].tolist() == [[[[False] * 3 + [True] * 5]], [[[True] * 8]]]
    # Positions 2 to 9, of which 8 and 9 are in the second chunk.
    assert made[False, ""].tolist() == [[[[False] * 6 + [True] * 2]]] * 2
    assert made[False, "padded"] is not None


def test_one_graph_for_all_tokens() -> None:
    """A static cache in a compiled model."""
    model, ids = model_of("llama"), token_ids(1, 12)
    want = forced(model, PackedCache(model.config, "q8_0", slots=32), ids, (6,) + (1,) * 6)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    cache = PackedCache(model.config, "q8_0", slots=32)
    with torch.no_grad():
        got = [model(ids[:, :6], past_key_values=cache).logits]
        got += [compiled(t, past_key_values=cache).logits for t in ids[:, 6:].split(1, 1)]
    assert torch.equal(torch.cat(got, 1), want)
    assert counter.frame_count == 1

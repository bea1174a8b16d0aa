"""Models over 2 and 4 processes, beside the same models in one.

The bound of the logits is that of fused layers (torch_metalmm/models/fuse/confirm.py): what errors
of 2^-8 in every product of a sharded layer do to the logits says what their roundings do.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hf_models import ARCHITECTURES, FFN, IDS, H, logits, random_model
from ranks import on_ranks
from torch import Tensor

from torch_metalmm import QuantLinear, quantize_, shard_
from torch_metalmm.nn.sharded import ColumnsLinear, RowsEmbedding, RowsLinear, Sharded

STAGES, ERROR = 10, 2.0**-8
# What transformers has no plan for.
GPT2 = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
# Its attention counts its heads, and computes with a bias for each of them.
T5 = {
    f"{stack}.block.*.layer.*.{attention}.{name}": style
    for stack, attentions in {"encoder": ["Self"], "decoder": ["Self", "EncDec"]}.items()
    for attention in [f"{kind}Attention" for kind in attentions]
    for name, style in zip(
        "qkvo", ["colwise_gather_output"] * 3 + ["rowwise_split_input"], strict=True
    )
} | {
    f"{stack}.block.*.layer.*.DenseReluDense.wi": "colwise_gather_output"
    for stack in ("encoder", "decoder")
}
PLANS = {"gpt2": GPT2, "t5": T5}
NAMES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "phi", "phi3", "gpt2")
FAMILIES = ("f16", "q4_0", "q5_1", "q4_k", "q3_k", "iq4_xs", "tq2_0", "mxfp4", "nvfp4") + (
    "affine4_g64",
    "affine3_g32_bf16",
)
WIDE = {"intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 16}


def built(name: str, format: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # formats of blocks that do not divide K
        model = quantize_(random_model(name, dtype, **config), format, progress=False)
    with torch.no_grad():
        for layer in model.modules():  # weights of 0.02 would leave every logit near 0
            if isinstance(layer, QuantLinear) and layer.bias is not None:
                layer.bias.mul_(4)
    return model


def sensitivity(model: Any, want: Tensor) -> Tensor:
    """The change of the logits of each position for errors of 1 in the products."""
    g = torch.Generator().manual_seed(0)

    def moved(layer: Any, args: Any, y: Tensor) -> Tensor:
        signs = torch.randint(0, 2, y.shape, generator=g) * 2 - 1
        return y * (1 + ERROR * signs).to(y.dtype)

    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    hooks = [layer.register_forward_hook(moved) for layer in layers]
    changed = logits(model)
    for hook in hooks:
        hook.remove()
    return (changed.double() - want.double()).norm(dim=-1) / ERROR


def sharded(
    mesh: Any, name: str, format: str, dtype: torch.dtype, config: dict[str, Any]
) -> tuple[Any, ...]:
    model = built(name, format, dtype, **config)
    want = logits(model)
    u = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype]
    rounding = u + FFN**0.5 * 2.0**-24
    bound = rounding * (STAGES * sensitivity(model, want) + want.double().norm(dim=-1))
    shard_(model, mesh, PLANS.get(name))
    got = logits(model)
    worst = ((got.double() - want.double()).norm(dim=-1) / bound).max()
    kinds = [type(m).__name__ for m in model.modules() if isinstance(m, Sharded)]
    return float(worst), got, kinds, float(want.norm())


def check(answers: list[tuple[Any, ...]]) -> list[str]:
    first = answers[0]
    for worst, got, kinds, size in answers:
        print(f"error / bound = {worst:.3g} of logits of {size:.3g}, {len(kinds)} sharded layers")
        assert worst <= 1 and size > 0
        assert torch.equal(got, first[1])  # ranks choose the same token
        assert kinds == first[2]
    return first[2]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_architectures(name: str, count: int) -> None:
    kinds = check(on_ranks(count, sharded, name, "q4_0", torch.float32, {}))
    assert {ColumnsLinear.__name__, RowsLinear.__name__, RowsEmbedding.__name__} == set(kinds)
    layers = ARCHITECTURES[name][2].get("num_hidden_layers", 2)
    of_layer = {"phi": 6, "phi3": 4, "gpt2": 4}.get(name, 7)
    assert len(kinds) == 2 + layers * of_layer


def test_an_encoder_and_a_decoder() -> None:
    kinds = check(on_ranks(2, sharded, "t5", "q4_0", torch.float32, {}))
    assert len(kinds) == 2 * (4 + 1) + 2 * (4 + 4 + 1)


@pytest.mark.parametrize("format", FAMILIES)
def test_formats(format: str) -> None:
    """Four ranks, columns at blocks of 256 too."""
    kinds = check(on_ranks(4, sharded, "mistral", format, torch.float32, WIDE))
    assert len(kinds) == 2 + 2 * 7


def test_bf16() -> None:
    check(on_ranks(2, sharded, "llama", "q4_0", torch.bfloat16, {}))


RAGGED = {
    "heads of keys": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64},
    "blocks": {"intermediate_size": 32 * 7},
    "vocabulary": {"vocab_size": 321},
    "one head of keys": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32},
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged(name: str) -> None:
    """Parts that differ: 2 and 1 heads of keys, 4 and 3 blocks; 5 heads of queries share one."""
    assert IDS.max() < 321 and H == 256
    kinds = check(on_ranks(2, sharded, "qwen3", "q8_0", torch.float32, RAGGED[name]))
    assert len(kinds) == 2 + 2 * 7

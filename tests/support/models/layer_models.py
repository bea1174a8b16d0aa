"""Small random transformers models with packed layers, whose decoder layers fuse_ knows or not; the
families of bench/models/families.py, made once for all tests that read them."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from bench.models.families import FAMILIES, family, fused_family, new_model, sizes
from torch_metalmm import QuantEmbedding, QuantLinear, fuse_, quantize_
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.fuse.norms import as_norm

VOCABULARY = 96
SIZES = sizes(64, 96, VOCABULARY, max_position_embeddings=64)
# Of Gemma 3n and 4: layers that read the rows of others, and embeddings for each layer.
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 8,
}
_HEAD = {"head_dim": 32}
_WINDOW = {"sliding_window": 4}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}

# {architecture: its options}
FUSED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": _WINDOW,
    "qwen2": {},  # biases
    "qwen3": _HEAD,  # norms of heads
    "phi3": {},  # q, k and v in one layer, gate and up in one
    "smollm3": {"no_rope_layer_interval": 2},  # the second layer rotates nothing
    "granite": {
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 12.0,
    },
    "olmo2": {},  # norms after the branches, and of q and k as wholes
    "gemma": _HEAD,
    "gemma2": _HEAD | _WINDOW,
    "gemma3_text": _HEAD | _WINDOW | _TWO_KINDS,
    "glm4": _HEAD,  # pairs, half of the dimensions
    "helium": {"head_dim": 16},  # pairs
    "ernie4_5": _HEAD,
}
# {architecture: the cores of a layer's branches, "" where attention alone is fused}
PARTS = {
    "starcoder2": "Heads Product",  # layer norms, and an MLP without a gate
    "cohere": "Beside",  # attention and MLP side by side
    "gpt_neox": "",  # the same, without a gate; q, k and v of a head together
    "gpt2": "Heads Whole",  # no rotation, and a table of positions
    "ministral3": "Heads GatedMLP",  # q grows with the position
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "ministral3": _HEAD
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        }
    },
}


def small(
    kind: str, format: str = "q8_0", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A random model in eval mode, the same at every call; norms that are not ones."""
    model = new_model(kind, SIZES | (FUSED | _OPTIONS).get(kind, {}) | options, dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += (torch.randn(parameter.shape) / 4).to(dtype)
        else:
            parameter.data *= 2  # sharper attention and larger branches than those of a new model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that the format does not fit
        return quantize_(model, format, progress=False)


def fused(kind: str, cache: str | None = None, **options: Any) -> Any:
    """small(), all its layers fused."""
    model = fuse_(small(kind, **options), "swiglu", cache=cache)
    assert all(are_fused(model))
    return model


@functools.cache
def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """small(), and fused. Tests share them: what a test changes it does to copies."""
    model = small(kind, dtype=dtype)
    return model, fuse_(copy.deepcopy(model), "swiglu")


def layers(model: Any) -> list[Any]:
    decoder = model.get_decoder()
    found: Any = decoder.layers if hasattr(decoder, "layers") else decoder.h
    return list(found)


def are_fused(model: Any) -> list[bool]:
    return [fused_layer(layer) is not None for layer in layers(model)]


def ids(*shape: int, seed: int = 0) -> Tensor:
    """Random ids without the special ones."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=g)


def logits(model: Any, **given: Any) -> Tensor:
    """Of a few ids, or of what is given."""
    with torch.no_grad():
        out: Tensor = model(**{"input_ids": ids(3, 9)} | given).logits
    return out


def near(a: Tensor, b: Tensor, k: int = 96, stages: int = 10) -> bool:
    """Whether a differs from b as sums of k products and fewer do in another order, in so many
    stages of each of two layers."""
    bound = 2 * stages * k**0.5 * 2.0**-24
    return bool((a - b).double().norm() <= bound * b.double().norm())


def padded(batch: int, length: int) -> dict[str, Tensor]:
    """Prompts padded on the left, each by one token more."""
    tokens, mask = ids(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        tokens[row, :row], mask[row, :row] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def dense(model: Any, kind: type[nn.Linear] = nn.Linear) -> Any:
    """A copy of an unfused model with the weights decoded to f32; linear layers of that kind."""
    copied = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        if isinstance(module, QuantLinear):
            linear = kind(module.in_features, module.out_features, module.bias is not None)
            linear.weight = nn.Parameter(module.dequantize(), requires_grad=False)
            linear.bias = module.bias
            copied.set_submodule(name, linear)
        elif isinstance(module, QuantEmbedding):
            rows = module(torch.arange(module.num_embeddings)).detach()
            copied.set_submodule(name, nn.Embedding.from_pretrained(rows))
    return copied


class _Norm(nn.Module):
    """A norm in float64; those of transformers go through f32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        weight = self.norm.weight().double() + self.norm.offset
        return weight * x * (x.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt()


def exact(model: Any) -> Any:
    """A float64 copy of a dense model."""
    copied = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1:
            norm = as_norm(module, weight.shape[0])
            if norm is not None:
                copied.set_submodule(name, _Norm(norm))
    return copied.double()


# {case: (family, options)}; keys that layers share, values that are keys before their norm,
# embeddings for each layer, and gates of which all but the largest are cut off.
CASES: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in FAMILIES} | {
    "gemma4_text shared": ("gemma4_text", SHARED),
    "gemma4_text v is k": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "gemma3n_text shared": (
        "gemma3n_text",
        SHARED | {"activation_sparsity_pattern": [0.9, 0.0] * 2},
    ),
}


@functools.cache
def family_pair(case: str) -> tuple[Any, Any]:
    """The packed model, and fused with a cache of q8_0. What a test changes it does to copies."""
    kind, options = CASES[case]
    model = family(kind, **options)
    return model, fused_family(model)

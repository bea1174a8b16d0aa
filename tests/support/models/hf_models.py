"""Small random transformers models of several architectures, and what they compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from oracle import APART, Value, addends, check, spec
from torch import Tensor

from torch_metalmm import QuantLinear

H, FFN, LAYERS, HEADS, VOCAB = 256, 512, 2, 4, 320

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
}
_DECODER = _SIZES | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_HEAD = {"head_dim": 64}

# name -> (class of the model, class of its config, the config's arguments)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"attention_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED | _HEAD),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED | _HEAD),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED | _HEAD),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED | _HEAD),
    "phi": ("PhiForCausalLM", "PhiConfig", _DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": H, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": H, "d_ff": FFN, "num_layers": LAYERS, "num_heads": HEADS}
        | {"d_kv": 64, "decoder_start_token_id": 0},
    ),
}

IDS = torch.tensor([[5, 77, 130, 9, 201, 44, 18, 301]])


def random_model(architecture: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A random model in eval mode, the same at every call."""
    kind, config_kind, arguments = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    made = getattr(transformers, config_kind)(**(arguments | config))
    model = getattr(transformers, kind)._from_config(made, dtype=dtype).eval()
    for name, parameter in model.named_parameters():  # zeros and ones would hide mistakes
        if parameter.dim() == 1:
            noise = torch.randn_like(parameter, dtype=torch.float32) / 8
            parameter.data += noise.to(dtype) if "bias" in name else noise.to(dtype) / 4
    return model


def logits(model: Any) -> Tensor:
    extra = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        out: Tensor = model(IDS, **extra)[0]
    return out


def tokens(model: Any) -> Tensor:
    """16 greedy tokens."""
    made: Tensor = model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=-1,
    )
    return made


def packed_bytes(model: Any) -> dict[str, tuple[str, Tensor]]:
    """{name: (format, bytes)} of the packed layers."""
    return {n: (m.format, m.weight) for n, m in model.named_modules() if hasattr(m, "format")}


def same_bytes(a: Any, b: Any) -> bool:
    """Whether two models have the same packed layers with the same bytes."""
    x, y = packed_bytes(a), packed_bytes(b)
    return x.keys() == y.keys() and all(
        x[n][0] == y[n][0] and torch.equal(x[n][1], y[n][1]) for n in x
    )


def products_of(
    model: Any, run: Callable[[], object], names: Container[str] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """{packed linear layer, or one of these: its x and y} while run() runs the model or a copy."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, layer: Any, x: tuple[Tensor, ...], y: Tensor) -> None:
        seen[name] = x[0], y

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if name in names or (not names and isinstance(layer, QuantLinear)):
                hooks.enter_context(layer.register_forward_hook(partial(note, name)))
        run()
    return seen


def decoded_product(layer: Any, x: Tensor) -> Value:
    """What a packed linear layer gives for x, before the store: that of the specification's W."""
    k = layer.in_features
    w, y = spec(layer.format, layer.weight, k), Value.of(x)
    if layer.format in APART:  # some kernels add up q x and x apart
        y = y.dot(w, k + 8, size=addends(layer.format, layer.weight, k))
    else:
        y = y.dot(w)
    return y if layer.bias is None else y + Value.of(layer.bias.detach())


def check_products(model: Any, run: Callable[[], object]) -> dict[str, tuple[Tensor, Tensor]]:
    """products_of, each of them checked."""
    seen = products_of(model, run)
    for name, (x, y) in seen.items():
        check(y, decoded_product(model.get_submodule(name), x).store(y.dtype), name)
    return seen


def change_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; ... removes one."""
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))

"""Random transformers models with experts, and what they compute from decoded weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench.models.families import sizes
from torch_metalmm import QuantEmbedding, QuantExperts, QuantLinear, formats

EXPERTS, CHOSEN, H, FFN = 6, 2, 128, 64
IDS = torch.tensor([[5, 77, 130, 9, 201, 44, 18, 301], [3, 4, 5, 6, 7, 8, 9, 10]])

_SIZES = sizes(H, FFN, num_experts_per_tok=CHOSEN)
_HEAD = {"head_dim": 32}
_LOCAL = {"num_local_experts": EXPERTS}
_NUM = {"num_experts": EXPERTS}
_WIDTH = {"moe_intermediate_size": FFN}
_ROUTED = _WIDTH | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
_ROUTED |= {"n_group": 1, "topk_group": 1}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
_MLA |= {"v_head_dim": 32, "num_key_value_heads": 4}

# config's class -> its own arguments
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": _LOCAL,
    "Qwen2Moe": _NUM | _WIDTH | {"shared_expert_intermediate_size": FFN},
    "Qwen3Moe": _NUM | _WIDTH | _HEAD,
    "GptOss": _LOCAL | _HEAD,
    "Olmoe": _NUM,
    "GraniteMoe": _LOCAL,
    "DeepseekV2": _ROUTED | _MLA,
    "DeepseekV3": _ROUTED | _MLA,
    "Glm4Moe": _ROUTED | _HEAD,
    "MiniMaxM2": _LOCAL | _HEAD,
    "Ernie4_5_Moe": _WIDTH | {"moe_num_experts": EXPERTS, "moe_k": CHOSEN},
    "Llama4Text": _LOCAL | _HEAD | {"intermediate_size_mlp": FFN, "num_experts_per_tok": 1},
}
_CLASSES = {"Llama4Text": "Llama4ForCausalLM"}


def expert_model(kind: str = "Qwen3Moe", **config: Any) -> Any:
    """A random dense model in f32 and eval mode, the same at every call."""
    made = getattr(transformers, f"{kind}Config")(**_SIZES | MODELS[kind] | config)
    made._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(0)
    model = getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))(made).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():  # zeros and ones would hide mistakes
            value.copy_(torch.randn(value.shape) * 0.1 + ("norm" in name))
    return model


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        out: Tensor = model(ids, **extra).logits
    return out


def greedy(model: Any) -> Tensor:
    """12 tokens after each prompt."""
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        out: Tensor = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    return out


def decoded(dense: Any, packed: Any) -> Any:
    """A copy of the dense model with the weights of the packed one, by the specification."""
    made = copy.deepcopy(dense)
    for name, module in packed.named_modules():
        target = made.get_submodule(name)
        if isinstance(module, QuantExperts):
            _experts(target, module)
        elif isinstance(module, QuantLinear | QuantEmbedding):
            target.weight.data = _rows(module.format, module.weight, target.weight.shape[1])
    return made


def _rows(format: str, packed: Tensor, k: int) -> Tensor:
    return formats.get(format).dequantize(packed.detach(), k)


def _experts(target: nn.Module, packed: QuantExperts) -> None:
    """Stacks as they lie in a model, written once more for its test: GptOss has rows of gate and
    up in turn, and like Llama 4 experts [E, K, rows]."""
    kind = type(target).__name__
    values = {}
    for stack, format in packed.formats.items():
        weight = packed.get_parameter(stack)
        k = H if stack != "down_proj" else FFN
        values[stack] = _rows(format, weight.flatten(0, 1), k).view(*weight.shape[:2], k)
    if "gate_proj" in values:
        gate, up = values.pop("gate_proj"), values.pop("up_proj")
        both = torch.stack((gate, up), 2).flatten(1, 2) if kind == "GptOssExperts" else None
        values["gate_up_proj"] = torch.cat((gate, up), 1) if both is None else both
    for stack, value in values.items():
        turned = kind in ("GptOssExperts", "Llama4TextExperts")
        target.get_parameter(stack).data = value.transpose(1, 2) if turned else value


def check_equals(model: Any, reference: Any, ids: Tensor = IDS) -> None:
    """The model errs against float64 by no more than a small multiple of the f32 model's error.

    Rounding accumulates over layers in ways no short formula bounds; the f32 model has the same
    weights and the same graph, so its own error is the measure.
    """
    y, y32 = logits(model, ids).double(), logits(reference, ids).double()
    y64 = logits(copy.deepcopy(reference).double(), ids)
    spacing = torch.finfo(torch.float32).eps * y64.abs().max().item()
    theirs = (y32 - y64).abs().max().item()
    assert (y - y64).abs().max().item() <= 6 * max(theirs, spacing)

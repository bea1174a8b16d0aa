"""LoRA files of Flux on packed layers.

diffusers compares an adapter with the shape of the layer's weight, because control adapters bring
inputs that the model does not have, and then makes a wider dense layer. The shape of packed bytes
is not the layer's. Adapters of other models are loaded by PEFT alone: models/lora/.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.loaders import lora_pipeline
from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin
from torch import Tensor

from ...nn import QuantLinear

_shape = FluxLoraLoaderMixin._calculate_module_shape
_dense = lora_pipeline._maybe_dequantize_weight_for_expanded_lora
_expand = FluxLoraLoaderMixin._maybe_expand_lora_state_dict.__func__
_A = ".lora_A.weight"


def _calculate_module_shape(
    model: Any, base_module: Any = None, base_weight_param_name: str | None = None
) -> torch.Size:
    layer = base_module
    if layer is None and base_weight_param_name is not None:
        layer = model.get_submodule(base_weight_param_name.removesuffix(".weight"))
    if isinstance(layer, QuantLinear):
        return torch.Size((layer.out_features, layer.in_features))
    return _shape(model, base_module, base_weight_param_name)


def _dequantize(model: Any, module: Any) -> Tensor:
    """The decoded weight, with which a wider dense layer begins."""
    if isinstance(module, QuantLinear):
        return module.dequantize(model.dtype)
    return _dense(model, module)


def _maybe_expand_lora_state_dict(
    cls: Any, transformer: Any, lora_state_dict: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Zeros for the inputs that an adapter lacks: diffusers would add up to the bytes of a row."""
    layers = dict(transformer.named_modules())
    for key, given in lora_state_dict.items():
        if not key.endswith(_A):
            continue
        layer = layers.get(key.removeprefix(f"{cls.transformer_name}.").removesuffix(_A))
        layer = getattr(layer, "base_layer", layer)
        if isinstance(layer, QuantLinear) and given.shape[1] < layer.in_features:
            missing = layer.in_features - given.shape[1]
            lora_state_dict[key] = torch.nn.functional.pad(given, (0, missing))
    return _expand(cls, transformer, lora_state_dict)


FluxLoraLoaderMixin._calculate_module_shape = staticmethod(_calculate_module_shape)
FluxLoraLoaderMixin._maybe_expand_lora_state_dict = classmethod(_maybe_expand_lora_state_dict)
lora_pipeline._maybe_dequantize_weight_for_expanded_lora = _dequantize

"""LoRA by PEFT on packed layers; loaded by itself as soon as peft.tuners.lora is.

Adapters train on a packed layer as on any nn.Linear: its forward is the packed one, and PEFT adds
to it. PEFT's own layer cannot change the packed bytes. Here it merges into a decoded copy of one
layer at a time, and the result is packed again in the same format. Packing again rounds; the error
is logged for each layer, summed up in a warning and kept for `merge_errors`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora.layer import Embedding, Linear
from peft.tuners.lora.model import LoraModel
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from peft.utils import PeftType
from torch import Tensor, nn

from ...nn import QuantEmbedding, QuantLinear
from ...nn.fused import LinearPart
from ...nn.packed import Packed, quantize_weight
from .base import MergesPacked, describe
from .report import forget, merges_reported, record

# Other named initialisations decompose the base weight or put a remainder in the weight's place.
_INITS = ("gaussian", "eva", "orthogonal")


class _OnPacked(MergesPacked):
    """Before a LoRA layer of PEFT in the bases: its base layer is packed."""

    base_layer: Any
    merged_adapters: list[str]
    _dora: Any
    _caches: dict[str, Any]
    _before_merge: tuple[Tensor, Tensor | None] | None = None

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {**super().lora_variants, ("use_dora",): self._dora}  # type: ignore[misc]

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
        init = config.init_lora_weights
        if isinstance(init, str) and init.lower() not in _INITS:
            raise ValueError(
                f"init_lora_weights: {init!r} needs the dense weight, but that of "
                f"{describe(self.base_layer)} is packed; "
                f"allowed: True, False, {', '.join(map(repr, _INITS))}"
            )
        if config.kasa_config is not None:
            raise ValueError(
                "kasa_config: must be None, it rewrites the weight of "
                f"{describe(self.base_layer)}, which is packed"
            )
        super().update_layer(adapter_name, *args, config=config, **kwargs)  # type: ignore[misc]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the weight and pack it again, once for all adapters merged so far.

        The bytes before the first merge are kept, so that unmerge() gives exactly them back.
        ValueError, and nothing changed: the merged weight has NaN or Inf.
        """
        if not isinstance(self.base_layer, Packed):
            return super().merge(safe_merge, adapter_names)  # type: ignore[misc]
        names = check_adapters_to_merge(self, adapter_names)
        if not names:
            return
        packed, already = self.base_layer, self.merged_adapters
        current = packed.weight, getattr(packed, "bias", None)
        weight, bias = self._before_merge or current
        _put(packed, weight, bias)
        try:
            with self.decoded() as dense:
                base = dense.weight.detach().clone()
                self.merged_adapters = []
                super().merge(safe_merge, [*already, *names])  # type: ignore[misc]
                merged = dense.weight.detach()
            # Quantizers may move values that an untrained adapter left where they were.
            new = weight if torch.equal(merged, base) else _pack(packed, merged)
        except BaseException:
            self.merged_adapters = already
            _put(packed, *current)
            raise
        if not self.merged_adapters:
            return  # none of them is in this layer
        self._before_merge = weight, bias
        _put(packed, new, None if bias is None else dense.bias.detach().to(bias.dtype))
        record(packed, base, merged)

    def unmerge(self) -> None:
        """Put the bytes back that the layer had before merge()."""
        if not isinstance(self.base_layer, Packed) or self._before_merge is None:
            return super().unmerge()  # type: ignore[misc]
        device = self.base_layer.weight.device
        weight, bias = self._before_merge
        _put(self.base_layer, weight.to(device), None if bias is None else bias.to(device))
        self._before_merge = None
        self.merged_adapters.clear()
        self._caches.clear()  # the tensors with which PEFT would have unmerged
        forget(self.base_layer)

    @contextmanager
    def decoded(self) -> Iterator[Any]:
        """Inside, base_layer is a dense f32 copy of itself, to be read or written."""
        packed = self.base_layer
        if not isinstance(packed, Packed):
            yield packed
            return
        self.base_layer = _dense_copy(packed)
        try:
            yield self.base_layer
        finally:
            self.base_layer = packed


class _Decodes:
    """DoRA needs the norms of the weight's rows, and decodes it for them in every forward."""

    @classmethod
    def init(cls, module: Any, *args: Any, **kwargs: Any) -> None:
        with module.decoded():
            super().init(module, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def forward(cls, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        with module.decoded():
            return super().forward(module, *args, **kwargs)  # type: ignore[misc]


class _DoraLinear(_Decodes, DoraLinearVariant):  # type: ignore[misc]
    pass


class _DoraEmbedding(_Decodes, DoraEmbeddingVariant):  # type: ignore[misc]
    pass


class PackedLoraLinear(_OnPacked, Linear):  # type: ignore[misc]
    """PEFT's lora.Linear around a QuantLinear."""

    _dora = _DoraLinear


class PackedLoraEmbedding(_OnPacked, Embedding):  # type: ignore[misc]
    """PEFT's lora.Embedding around a QuantEmbedding."""

    _dora = _DoraEmbedding

    def _get_embed_scale(self) -> Tensor | None:
        scale = self.get_base_layer().embed_scale
        if isinstance(scale, float):  # PEFT's own would give the result the dtype of the weight
            return torch.tensor(scale, device=self.base_layer.weight.device)
        return super()._get_embed_scale()


class PackedLoraModel(LoraModel):  # type: ignore[misc]
    """PEFT's LoraModel, which also knows packed layers; all others are left to it."""

    @staticmethod
    def _create_new_module(
        lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any
    ) -> nn.Module:
        if not isinstance(target, Packed) or lora_config._custom_modules:
            return LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)
        if (name := kwargs.pop("parameter_name", None)) is not None:
            raise ValueError(
                f"target_parameters: {name} of {describe(target)} is packed; use target_modules"
            )
        if lora_config.fan_in_fan_out and isinstance(target, QuantLinear):
            warnings.warn(
                "fan_in_fan_out is set, but a packed layer stores [out, in]; setting it to False",
                stacklevel=2,
            )
            lora_config.fan_in_fan_out = False
        kind = PackedLoraLinear if isinstance(target, QuantLinear) else PackedLoraEmbedding
        return kind(target, adapter_name, config=lora_config, **kwargs)

    def _check_merge_allowed(self) -> None:
        super()._check_merge_allowed()
        for name, module in self.model.named_modules():
            if isinstance(module, _OnPacked) and isinstance(module.base_layer, LinearPart):
                raise ValueError(f"{name} is part of a fused layer; call unfuse_ before merging")

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        with merges_reported(self.model):
            super().merge_adapter(*args, **kwargs)

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        with merges_reported(self.model):
            return super()._unload_and_optionally_merge(*args, **kwargs)


def _dense_copy(packed: Any) -> nn.Module:
    weight = nn.Parameter(packed.dequantize(), requires_grad=False)
    dense: nn.Module
    if isinstance(packed, QuantEmbedding):
        rows, width = weight.shape
        dense = nn.Embedding(rows, width, packed.padding_idx, device="meta")
        if isinstance(packed.embed_scale, Tensor):
            dense.register_buffer("embed_scale", packed.embed_scale)
        else:
            dense.embed_scale = packed.embed_scale  # type: ignore[assignment]
    else:
        dense = nn.Linear(packed.in_features, packed.out_features, False, device="meta")
        if packed.bias is not None:
            dense.bias = nn.Parameter(packed.bias.detach().clone(), requires_grad=False)
    dense.weight = weight
    return dense


def _pack(layer: Any, merged: Tensor) -> Tensor:
    if not merged.isfinite().all():
        raise ValueError("the merged weight has NaN or Inf; the adapter is broken")
    order = getattr(layer, "input_order", None)
    return quantize_weight(merged if order is None else merged[:, order], layer.format)


def _put(layer: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Give the layer other tensors, as new parameters: a tied layer may hold the old ones."""
    layer.weight = _frozen(weight)
    if bias is not None:
        layer.bias = _frozen(bias)


def _frozen(t: Tensor) -> nn.Parameter:
    return t if isinstance(t, nn.Parameter) else nn.Parameter(t, requires_grad=False)


# Every way of adding adapters looks into PEFT's table of methods.
PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = PackedLoraModel

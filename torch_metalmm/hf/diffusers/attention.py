"""fuse_qkv_projections of diffusers' models: refused where a projection that it joins is packed.

The method makes an nn.Linear of the joined weights, in the dtype of the first, and torch says of
packed ones that only floats require gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from diffusers.models.attention import AttentionMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from ...nn import QuantLinear

_JOINED = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def _refuses_packed(fuse: Callable[..., None]) -> Callable[..., None]:
    """The method of a model or of one attention layer, with a check before anything is changed."""

    @functools.wraps(fuse)
    def checked(self: nn.Module, *args: Any, **options: Any) -> None:
        for name, module in self.named_modules():
            if not hasattr(module, "fuse_projections"):
                continue
            for child in _JOINED:
                layer = getattr(module, child, None)
                layer = getattr(layer, "base_layer", layer)  # under an adapter
                if isinstance(layer, QuantLinear):
                    raise ValueError(
                        f"{fuse.__name__}: {name}{'.' if name else ''}{child} is packed in "
                        f"{layer.format}, and packed projections are not fused; fuse the dense "
                        "model and pack it then, or leave them apart"
                    )
        fuse(self, *args, **options)

    return checked


# The models that have a method of their own call that of each Attention.
AttentionMixin.fuse_qkv_projections = _refuses_packed(AttentionMixin.fuse_qkv_projections)
Attention.fuse_projections = _refuses_packed(Attention.fuse_projections)

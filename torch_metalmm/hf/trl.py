"""TRL's trainers on models whose output head is packed.

TRL's loss multiplies slices of rows of `lm_head.weight`, 8192 at a time, so that no logits of a
whole batch exist. A packed head decodes each slice when it is asked for.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from trl.trainer import utils

from .. import formats
from ..nn import QuantLinear

_add_fused_lm_head = utils.add_fused_lm_head


class _Rows(Tensor):
    """W [V, K] of a packed head, without storage: a slice of rows is decoded, so is W otherwise."""

    head: QuantLinear

    @staticmethod
    def __new__(cls, head: QuantLinear) -> _Rows:
        rows: _Rows = Tensor._make_wrapper_subclass(
            cls,
            (head.out_features, head.in_features),
            dtype=formats.get(head.format).exact,
            device=head.weight.device,
        )
        rows.head = head
        return rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.slice.Tensor and (len(args) < 2 or args[1] == 0):
            weight = func(args[0].head.weight, *args[1:], **(kwargs or {}))
            return args[0]._decoded(weight)
        return func(*tree_map(cls._dense, args), **tree_map(cls._dense, kwargs or {}))

    @classmethod
    def _dense(cls, value: Any) -> Any:
        return value._decoded(value.head.weight) if isinstance(value, cls) else value

    def _decoded(self, weight: Tensor) -> Tensor:
        part = QuantLinear.from_packed(weight, self.head.in_features, self.head.format)
        part.input_order = self.head.input_order
        return part.dequantize(self.dtype)


@functools.wraps(_add_fused_lm_head)
def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
    _add_fused_lm_head(model, *args, **kwargs)
    fused, find = model.forward, model.get_output_embeddings

    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head = find()
        if not fused_lm_head or type(head) is not QuantLinear:
            return fused(*args, fused_lm_head=fused_lm_head, **kwargs)
        model.get_output_embeddings = lambda: SimpleNamespace(weight=_Rows(head), bias=head.bias)
        try:
            return fused(*args, fused_lm_head=True, **kwargs)
        finally:
            del model.get_output_embeddings

    model.forward = functools.wraps(fused)(forward)  # generate() reads the signature


utils.add_fused_lm_head = add_fused_lm_head

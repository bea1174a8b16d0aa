"""The Linear layer whose weight stays packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import formats
from .activations import Activations, of_call, set_activations, takes_rounded
from .packed import Packed, check_packed, packed_as

_linear = torch.ops.metalmm.linear.default


class QuantLinear(Activations, Packed, NonDynamicallyQuantizableLinear):
    """y[..., N] = x[..., K] · W[N, K]ᵀ (+ bias), W packed in one of the formats.

    With `input_order`, int64 [K], column j of the packed matrix belongs to x[..., input_order[j]]:
    some architectures reorder columns, and blocks of a packed row cannot be reordered inside.

    x may be float32, float16 or bfloat16; y has its dtype. The weight is a frozen uint8 parameter
    [N, row_bytes], so `.half()` and `.to(dtype)` convert the bias and leave the weight alone. The
    layer is an nn.Linear for code that looks for one (PEFT, Trainer), of the kind that torchao's
    quantize_ leaves alone; code that computes with `.weight` itself has to call `dequantize()`.

    activations, set by activations_: None, or "int8" or "int16" where x on the CPU is rounded to so
    many bits in blocks (torch_metalmm/formats/activations.py). Other devices read x exactly.
    """

    input_order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        format: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype is the bias's. ValueError: unknown format, or K not a multiple of its block."""
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self._init_packed(out_features, in_features, format, device)
        if bias:
            zeros = torch.zeros(out_features, device=device, dtype=dtype)
            self.bias = nn.Parameter(zeros, requires_grad=False)
        else:
            self.register_parameter("bias", None)
        self.register_buffer("input_order", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str) -> QuantLinear:
        """Quantize linear.weight; the bias is shared. ValueError as `torch.ops.metalmm.quantize`.

        A QuantLinear is decoded and quantized again unless it already has the format.
        """
        name = formats.get(format).name
        packed = packed_as(linear, name)
        layer = cls.from_packed(packed, linear.in_features, name, linear.bias)
        if packed is linear.weight:
            layer.input_order = getattr(linear, "input_order", None)
        if isinstance(linear, QuantLinear) and takes_rounded(name):
            set_activations(layer, linear.activations)
        return layer

    @classmethod
    def from_packed(
        cls, weight: Tensor, in_features: int, format: str, bias: Tensor | None = None
    ) -> QuantLinear:
        """A layer around packed bytes uint8 [N, row_bytes(in_features)]; nothing is copied.

        For f32, f16 and bf16 the weight may also be a [N, in_features] tensor of that dtype.
        ValueError: the dtype or shape does not fit.
        """
        spec, packed = check_packed(weight, in_features, format)
        n = packed.shape[0]
        if bias is not None and (bias.shape != (n,) or not bias.is_floating_point()):
            raise ValueError(f"bias must be float [{n}], got {bias.dtype} {list(bias.shape)}")
        layer = cls(in_features, n, False, spec.name, device="meta")
        layer.weight = packed
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    def _columns(self) -> int:
        return self.in_features

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """W [N, K] as a new dense tensor of `dtype` (default float32), columns in x's order."""
        dense = super().dequantize(dtype)
        return dense if self.input_order is None else dense[:, self.input_order.argsort()]

    def forward(self, x: Tensor) -> Tensor:
        # Read from the dicts, because nn.Module.__getattr__ takes a microsecond for each attribute.
        order = self._buffers["input_order"]
        if order is not None:
            x = x.index_select(-1, order)
        tensors, kind = self._parameters, of_call(self._activations, x)
        return _linear(x, tensors["weight"], tensors["bias"], self.format, **kind)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        order = state_dict.get(prefix + "input_order")
        if order is not None and self.input_order is None:
            self.input_order = torch.empty_like(order, device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format}"
        )

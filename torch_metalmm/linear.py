"""Linear and Embedding layers whose weight stays packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from . import formats
from . import ops as ops  # registers torch.ops.metalmm
from .packed import Packed, check_packed

_linear = torch.ops.metalmm.linear.default


class QuantLinear(Packed, NonDynamicallyQuantizableLinear):
    """y[..., N] = x[..., K] · W[N, K]ᵀ (+ bias), W packed in one of the formats.

    With `input_order`, int64 [K], column j of the packed matrix belongs to x[..., input_order[j]]:
    some architectures reorder columns, which cannot be done inside the blocks of a packed row.

    x may be float32, float16 or bfloat16; y has its dtype. The weight is a frozen uint8 parameter
    [N, row_bytes], so `.half()` and `.to(dtype)` convert the bias and leave the weight alone. It is
    an nn.Linear for code that looks for one (PEFT, Trainer), of the kind that torchao's quantize_
    leaves alone; code that computes with `.weight` itself has to call `dequantize()`.
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
        if isinstance(linear, QuantLinear) and linear.format == name:
            packed: Tensor = linear.weight
        else:
            dense = linear.dequantize() if isinstance(linear, QuantLinear) else linear.weight
            packed = quantize_weight(dense, name)
        layer = cls.from_packed(packed, linear.in_features, name, linear.bias)
        if packed is linear.weight:
            layer.input_order = getattr(linear, "input_order", None)
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
        # The dicts, because each attribute found by nn.Module.__getattr__ costs a microsecond.
        order = self._buffers["input_order"]
        if order is not None:
            x = x.index_select(-1, order)
        tensors = self._parameters
        y: Tensor = _linear(x, tensors["weight"], tensors["bias"], self.format)
        return y

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


class QuantEmbedding(Packed, nn.Embedding):
    """y[..., K] = W[ids], W [V, K] packed in one of the formats; y has dtype `self.dtype`.

    `.to(dtype)`, `.half()` and the like change `self.dtype`. `embed_scale` multiplies the rows, if
    it is set: a tensor is rounded to `dtype` (Gemma), a float is not (BART).
    """

    embed_scale: Tensor | float | None
    scalar_embed_scale: float | None  # what the tensor embed_scale holds, rounded to dtype
    dtype: torch.dtype

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: str,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        embed_scale: Tensor | float | None = None,
    ) -> None:
        """ValueError: unknown format, or K not a multiple of its block."""
        nn.Module.__init__(self)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.dtype = dtype or torch.get_default_dtype()
        self._init_packed(num_embeddings, embedding_dim, format, device)
        self.scalar_embed_scale = None
        if isinstance(embed_scale, Tensor):
            self.scalar_embed_scale = float(embed_scale)
            self.register_buffer("embed_scale", None, persistent=False)
            self.reset_scale()
        else:
            self.embed_scale = embed_scale

    def reset_scale(self) -> None:
        """Make the buffer embed_scale anew: no checkpoint has it."""
        if self.scalar_embed_scale is not None:
            device = "cpu" if self.weight.is_meta else self.weight.device
            self.embed_scale = torch.tensor(
                self.scalar_embed_scale, dtype=self.dtype, device=device
            )

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, format: str) -> QuantEmbedding:
        """Quantize embedding.weight; the result has its dtype, padding_idx and embed_scale.

        ValueError: max_norm is set, or as `torch.ops.metalmm.quantize`.
        """
        if embedding.max_norm is not None:
            raise ValueError("max_norm rewrites the weight at run time; a packed one is frozen")
        name = formats.get(format).name
        if not isinstance(embedding, QuantEmbedding):
            packed, dtype = quantize_weight(embedding.weight, name), embedding.weight.dtype
        elif embedding.format == name:
            packed, dtype = embedding.weight, embedding.dtype
        else:
            packed, dtype = quantize_weight(embedding.dequantize(), name), embedding.dtype
        return cls.from_packed(
            packed,
            embedding.embedding_dim,
            name,
            embedding.padding_idx,
            dtype,
            embedding_scale(embedding),
        )

    @classmethod
    def from_packed(
        cls,
        weight: Tensor,
        embedding_dim: int,
        format: str,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        embed_scale: Tensor | float | None = None,
    ) -> QuantEmbedding:
        """A layer around packed bytes uint8 [V, row_bytes(embedding_dim)]; nothing is copied.

        For f32, f16 and bf16 the weight may also be a [V, embedding_dim] tensor of that dtype.
        ValueError: the dtype or shape does not fit.
        """
        spec, packed = check_packed(weight, embedding_dim, format)
        layer = cls(
            packed.shape[0], embedding_dim, spec.name, padding_idx, "meta", dtype, embed_scale
        )
        layer.weight = packed
        return layer

    def as_linear(self) -> QuantLinear:
        """The tied output head: y = x · Wᵀ with this very weight, not a copy."""
        return QuantLinear.from_packed(self.weight, self.embedding_dim, self.format)

    def _columns(self) -> int:
        return self.embedding_dim

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = torch.ops.metalmm.embedding(
            input, self.weight, self.format, self.embedding_dim, dtype=self.dtype
        )
        scale = self.embed_scale
        if isinstance(scale, Tensor):
            scale = scale.to(y.dtype)
        return y if scale is None else y * scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantEmbedding:
        # The bytes do not follow .to(dtype), so an empty tensor of the output dtype asks fn.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probe = torch.empty(0, dtype=self.dtype, device=self.weight.device)
        self.dtype = fn(probe).dtype
        return self

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, format={self.format}, "
            f"dtype={self.dtype}"
        )


def embedding_scale(embedding: nn.Embedding) -> Tensor | float | None:
    """What the embedding multiplies its rows by, as QuantEmbedding takes it; None for nothing."""
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(scale, Tensor):
        return None if scale is None else float(scale)
    # Gemma's buffer embed_scale has no data on the meta device; its scalar_embed_scale does.
    value = float(getattr(embedding, "scalar_embed_scale", scale))
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def quantize_weight(weight: Tensor, format: str) -> Tensor:
    """weight [N, K] -> uint8 [N, row_bytes] on the weight's device. The quantizers run on the CPU.

    ValueError: the weight has no data (meta), is not 2-D, or has NaN or Inf.
    """
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and has no data to quantize")
    source = weight.detach().to("cpu")
    if source.dtype == torch.float64:
        source = source.float()
    packed: Tensor = torch.ops.metalmm.quantize(source, format)
    return packed.to(weight.device)

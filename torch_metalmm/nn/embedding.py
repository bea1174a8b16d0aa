"""The Embedding layer whose weight stays packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import formats
from .linear import QuantLinear
from .packed import Packed, check_packed, packed_as


class QuantEmbedding(Packed, nn.Embedding):
    """y[..., K] = W[ids], W [V, K] packed in one of the formats; y has dtype `self.dtype`.

    `.to(dtype)`, `.half()` and the like change `self.dtype`. `embed_scale` multiplies the rows, if
    it is set: a tensor is rounded to `dtype` (Gemma), a float is not (BART).
    """

    embed_scale: Tensor | float | None
    scalar_embed_scale: float | None  # the value of the tensor embed_scale, rounded to dtype
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
            raise ValueError(
                f"max_norm: {embedding.max_norm}; must be None, it rewrites the weight at run time "
                "and a packed one is frozen"
            )
        name = formats.get(format).name
        own = embedding if isinstance(embedding, QuantEmbedding) else embedding.weight
        return cls.from_packed(
            packed_as(embedding, name),
            embedding.embedding_dim,
            name,
            embedding.padding_idx,
            own.dtype,
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
        scale = self._scale()
        of_op = scale if isinstance(scale, Tensor) else None
        y: Tensor = torch.ops.metalmm.embedding(
            input, self.weight, self.format, self.embedding_dim, dtype=self.dtype, scale=of_op
        )
        return y if scale is None or of_op is not None else y * scale

    def _scale(self) -> Tensor | float | None:
        """The factor of the rows: a number, or a tensor in the rows' dtype; None: there is none."""
        scale = self.embed_scale
        return scale.to(self.dtype) if isinstance(scale, Tensor) else scale

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
    """The factor of the embedding's rows, as QuantEmbedding takes it; None: there is none."""
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(scale, Tensor):
        return None if scale is None else float(scale)
    # Gemma's buffer embed_scale has no data on the meta device; its scalar_embed_scale does.
    value = float(getattr(embedding, "scalar_embed_scale", scale))
    return torch.tensor(value, dtype=torch.float64, device="cpu")

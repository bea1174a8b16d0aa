"""The common part of every format: names, sizes, argument checks and bounded memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

VALUES_AT_A_TIME = 1 << 20  # in a conversion: a few tens of MB of temporaries

FLOOR = 2.0**-40  # part of the largest (within a factor of 2) that less importance counts as

# The dtypes of activations, results and sources, by their names in formats and kernels.
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def row_slices(n: int, k: int) -> Iterator[slice]:
    """Slices of consecutive rows that cover n rows of k values, about VALUES_AT_A_TIME in each."""
    count = max(1, VALUES_AT_A_TIME // max(1, k))
    return (slice(r, min(n, r + count)) for r in range(0, n, count))


def normalised(importance: Tensor) -> Tensor:
    """importance f32 [K] / 2**floor(log2(its largest)), at least FLOOR; all 1 where all are 0.

    Only proportions count. So no sum of a search overflows for it, or is 0.
    """
    top = importance.max() if len(importance) else importance.new_zeros(())
    if not bool(top > 0):
        return torch.ones_like(importance)
    _, exponent = torch.frexp(top)  # top = m * 2**exponent, 0.5 <= m < 1
    return torch.ldexp(importance.double(), 1 - exponent).float().clamp(min=FLOOR)


class Format(ABC):
    """A way to store a weight matrix W[N, K] as uint8 [N, row_bytes(K)].

    quantize and dequantize are the specification that the native kernels are tested against.
    Both compute in f32 with one IEEE rounding per operation.
    """

    name: str
    block_values: int  # K must be a multiple of this; for affine, the group size
    block_bytes: int  # bytes of block_values values, without the padding of a row
    # The format for a K that the block does not divide: llama.cpp's choice. A format of blocks of
    # more than 32 values names one.
    fallback: str | None = None
    # False: the codes take more than the weights to choose, and quantize refuses.
    packs = True
    # The smallest dtype that has every value of the format, subnormal ones too.
    exact = torch.float32
    # Whether quantize reads an importance.
    weighs = False
    # Whether a value's weight depends, with an importance, on its whole row, not its block alone.
    over_rows = False

    @property
    def bits_per_weight(self) -> float:
        """8 * block_bytes / block_values."""
        return 8 * self.block_bytes / self.block_values

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k values. ValueError if k is not a multiple of the block."""
        if k < 0 or k % self.block_values:
            raise ValueError(
                f"{self.name}: K = {k} is not a multiple of the block of {self.block_values} values"
            )
        return k // self.block_values * self.block_bytes

    def quantize(self, w: Tensor, importance: Tensor | None = None) -> Tensor:
        """w [N, K] f32, f16 or bf16 -> uint8 [N, row_bytes(K)].

        importance f32 [K], finite and not negative: how much the square of an error in each column
        costs, for instance the mean square of what the column multiplies. Formats whose codes are
        rounded, not searched, do not read it (`weighs`): dense ones, q8_0, mxfp4, nvfp4, mxfp8,
        tq1_0, tq2_0, q1_0 and q2_0.
        ValueError if a shape, a dtype or K does not fit, if a row has NaN or Inf, if the importance
        is not as said, or if the format is only read (`packs`).
        Nothing is raised for a finite value beyond the range of the format's scales: it stores an
        infinite scale (from about 1e18 on perhaps a NaN), as ggml does; layers refuse it.
        """
        if not self.packs:
            raise ValueError(self.refusal())
        if w.dim() != 2:
            raise ValueError(f"{self.name}: w must be [N, K], got shape {list(w.shape)}")
        if w.dtype not in DTYPES.values():
            raise ValueError(f"{self.name}: w must be float32, float16 or bfloat16, got {w.dtype}")
        n, k = w.shape
        out = torch.empty(n, self.row_bytes(k), dtype=torch.uint8, device=w.device)
        given = () if importance is None else (self._checked(importance, k),)
        for rows in row_slices(n, k):
            x = w[rows].detach().to(torch.float32)
            finite = torch.isfinite(x).all(dim=1)
            if not bool(finite.all()):
                row = rows.start + int((~finite).nonzero()[0])
                raise ValueError(f"{self.name}: row {row} of w has NaN or Inf")
            if k > 0:
                out[rows] = self._encode_rows(x, *given)
        return out

    def _checked(self, importance: Tensor, k: int) -> Tensor:
        if importance.dtype != torch.float32 or tuple(importance.shape) != (k,):
            raise ValueError(
                f"{self.name}: importance must be float32 [{k}], got {importance.dtype} "
                f"{list(importance.shape)}"
            )
        if not bool((torch.isfinite(importance) & (importance >= 0)).all()):
            raise ValueError(f"{self.name}: importance has an element that is negative, NaN or Inf")
        return normalised(importance)

    def refusal(self) -> str:
        """Why quantize refuses, where it does."""
        return (
            f"{self.name} is only read here: llama.cpp chooses its codes by an importance matrix, "
            "and no quantizer of this package makes them, with one or without; load a file in it, "
            "or quantize to another format"
        )

    def dequantize(self, packed: Tensor, k: int) -> Tensor:
        """packed uint8 [N, row_bytes(k)] -> W f32 [N, k]. ValueError if dtype or shape differs."""
        self._check_packed(packed, k)
        n = packed.shape[0]
        out = torch.empty(n, k, dtype=torch.float32, device=packed.device)
        for rows in row_slices(n, k):
            if k > 0:
                out[rows] = self._decode_rows(packed[rows], k)
        return out

    def _check_packed(self, packed: Tensor, k: int) -> None:
        row_bytes = self.row_bytes(k)
        if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != row_bytes:
            raise ValueError(
                f"{self.name}: packed must be uint8 [N, {row_bytes}] for K = {k}, "
                f"got {packed.dtype} {list(packed.shape)}"
            )

    @abstractmethod
    def _encode_rows(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        """x f32 [R, K], finite, K > 0 -> uint8 [R, row_bytes]; importance f32 [K], normalised."""

    @abstractmethod
    def _decode_rows(self, packed: Tensor, k: int) -> Tensor:
        """uint8 [R, row_bytes] -> f32 [R, k]."""

    def __repr__(self) -> str:
        return f"<format {self.name}>"


class BlockFormat(Format):
    """A row is a sequence of independent blocks of block_values values in block_bytes bytes."""

    def _encode_rows(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        return self.encode(x.reshape(-1, self.block_values)).reshape(x.shape[0], -1)

    def _decode_rows(self, packed: Tensor, k: int) -> Tensor:
        return self.decode(packed.reshape(-1, self.block_bytes)).reshape(packed.shape[0], k)

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """x f32 [B, block_values] -> uint8 [B, block_bytes]."""

    @abstractmethod
    def decode(self, blocks: Tensor) -> Tensor:
        """uint8 [B, block_bytes] -> f32 [B, block_values]."""

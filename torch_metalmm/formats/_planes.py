"""Formats that MLX has as two planes, codes and scales of a byte each."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ._base import BlockFormat
from ._bits import as_bytes, codes_to_stream, stream_to_codes


class Planes(BlockFormat):
    """A format of blocks whose codes and scales pack() takes from an MLX layer."""

    bits: int
    group: int  # values with one scale

    @abstractmethod
    def join(self, codes: Tensor, scales: Tensor) -> Tensor:
        """codes uint8 [B, block_values], scales uint8 [B, block_values / group] -> blocks."""

    @abstractmethod
    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse of join."""

    @abstractmethod
    def refused(self, codes: Tensor, scales: Tensor) -> str | None:
        """A code or scale that MLX could have and this format has not; None: there is none."""

    def pack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The tensors of an MLX layer -> uint8 [N, row_bytes(K)], no bit changed.

        codes uint32 [N, K * bits / 32], in order; scales uint8 [N, K / group].
        ValueError if a shape or dtype does not fit, if K is not a multiple of the block, or if
        a code or scale means something else here.
        """
        if codes.dtype != torch.uint32 or codes.dim() != 2:
            raise ValueError(
                f"{self.name}: codes must be uint32 [N, K * {self.bits} / 32], "
                f"got {codes.dtype} {list(codes.shape)}"
            )
        n, k = codes.shape[0], codes.shape[1] * 32 // self.bits
        row_bytes = self.row_bytes(k)
        if scales.dtype != torch.uint8 or tuple(scales.shape) != (n, k // self.group):
            raise ValueError(
                f"{self.name}: scales must be uint8 [{n}, {k // self.group}], "
                f"got {scales.dtype} {list(scales.shape)}"
            )
        q = stream_to_codes(as_bytes(codes), self.bits)
        if (what := self.refused(q, scales)) is not None:
            raise ValueError(f"{self.name}: {what}")
        of_blocks = scales.reshape(-1, self.block_values // self.group)
        return self.join(q.reshape(-1, self.block_values), of_blocks).reshape(n, row_bytes)

    def unpack(self, packed: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Inverse of pack: (codes uint32, scales)."""
        self._check_packed(packed, k)
        n = packed.shape[0]
        q, scales = self.split(packed.reshape(-1, self.block_bytes))
        codes = codes_to_stream(q.reshape(n, -1), self.bits)
        return codes.contiguous().view(torch.uint32), scales.reshape(n, -1).contiguous()

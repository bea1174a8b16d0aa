"""Formats that MLX has as two planes, codes and scales of a byte each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ._base import BlockFormat, Format
from ._bits import as_bytes, codes_to_stream, stream_to_codes


def sizes_of(
    format: Format,
    bits: int,
    codes: Tensor,
    group: int,
    dtype: torch.dtype,
    of_groups: Mapping[str, Tensor],
) -> tuple[int, int]:
    """(N, row_bytes) of the tensors of an MLX layer. ValueError: a shape or dtype does not fit."""
    if codes.dtype != torch.uint32 or codes.dim() != 2:
        raise ValueError(
            f"{format.name}: codes must be uint32 [N, K * {bits} / 32], "
            f"got {codes.dtype} {list(codes.shape)}"
        )
    n, k = codes.shape[0], codes.shape[1] * 32 // bits
    row_bytes = format.row_bytes(k)
    for label, t in of_groups.items():
        if t.dtype != dtype or tuple(t.shape) != (n, k // group):
            raise ValueError(
                f"{format.name}: {label} must be {dtype} [{n}, {k // group}], "
                f"got {t.dtype} {list(t.shape)}"
            )
    return n, row_bytes


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
        of_groups = {"scales": scales}
        n, row_bytes = sizes_of(self, self.bits, codes, self.group, torch.uint8, of_groups)
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

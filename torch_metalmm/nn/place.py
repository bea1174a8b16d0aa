"""Weights of a file in the memory of a device."""

from __future__ import annotations

import torch
from torch import Tensor


def place(rows: Tensor, device: torch.device | str | None) -> Tensor:
    """`rows` on `device`, as `rows.to(device)`.

    On MPS the CPU copies them, from a mapped file straight into the memory that the GPU reads: the
    weights are there once, and the pages of the file may go. torch's own copy has the GPU read the
    file's pages, all of which are then wired beside the copy. Before torch 2.13, which tells where
    that memory is, it is torch's copy.
    """
    has_alias = hasattr(torch.mps, "_host_alias_storage")
    if device is None or torch.device(device).type != "mps" or rows.is_mps or not has_alias:
        return rows.to(device)
    return _copied(rows, torch.empty(rows.shape, dtype=rows.dtype, device=device))


def _copied(rows: Tensor, out: Tensor) -> Tensor:
    if rows.numel() == 0:
        return out
    torch.mps.synchronize()  # queued work may read memory that torch has given out again
    memory = torch.mps._host_alias_storage(out.untyped_storage())
    host = torch.empty(0, dtype=out.dtype)
    host.set_(memory, out.storage_offset(), out.shape, out.stride()).copy_(rows)
    return out

"""Whether the packed weights of a model decode to finite values, at the price of one token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..nn.packed import PackedState


def check_finite(path: str | os.PathLike[str], model: nn.Module) -> None:
    """ValueError that names the file, the tensor, the row and the value: a weight is NaN or Inf.

    The sums of the rows say it, which are products with ones; rows of such a sum are decoded.
    SmolLM2 (98 MB of q4_1 and q8_0) takes 9 to 10 ms of CPU time on one thread of an AVX-512 core,
    0.1 s a GB. Rejected: torch's threads, which wait by spinning, 16 to 155 ms on 2 cores; torch's
    reads of the scales alone, every 20th or 34th byte, 24 ms, and the same pages of a mapped file.
    Not checked: weights on the CPU of more than half of the memory, which are mapped and read when
    used.
    """
    weights = list(_weights(model))
    held = sum(w.nbytes for _, w, _ in weights if w.device.type == "cpu")
    if held > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sums = {name: (w, kind, _sums(w, kind)) for name, w, kind in weights}
    finally:
        torch.set_num_threads(threads)
    if not sums or bool(torch.stack([s.isfinite().all().cpu() for *_, s in sums.values()]).all()):
        return
    for name, (weight, kind, total) in sums.items():
        for row in (~total.isfinite()).nonzero().flatten().tolist():
            values = torch.ops.metalmm.dequantize(weight[row : row + 1], kind)[0]
            if wrong := values[~values.isfinite()].tolist():
                raise ValueError(f"{path}: {name} has {wrong[0]} in row {row}, where it decodes")


def _weights(model: Any) -> Iterator[tuple[str, Tensor, str]]:
    """(name, uint8 [rows, row_bytes], format) of each packed weight that has data; once each."""
    seen = set()
    for name, module in model.named_modules():
        given = module.packed() if isinstance(module, PackedState) else {}
        for leaf, (kind, _) in given.items():
            weight = getattr(module, leaf).detach()
            if weight.is_meta or weight.numel() == 0 or weight.data_ptr() in seen:
                continue
            seen.add(weight.data_ptr())
            yield f"{name}.{leaf}", weight.flatten(0, -2), kind


def _sums(weight: Tensor, kind: str) -> Tensor:
    spec = formats.get(kind)
    k = weight.shape[1] // spec.block_bytes * spec.block_values
    ones = torch.ones(1, k, dtype=torch.float32, device=weight.device)
    total: Tensor = torch.ops.metalmm.linear(ones, weight, None, kind)
    return total[0]

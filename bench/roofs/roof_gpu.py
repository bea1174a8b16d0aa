"""The ceilings of a GPU: memory read or copied, f16 matrix products; the fastest way counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices import Device
from ..problem import LABELS
from .roof import Probe, Roof
from .roof_cuda import Reader

MIN_BYTES = 1 << 30
COLUMNS = 4096


def memory_probes(device: Device, bytes: int) -> list[Probe]:
    """Reading by reductions, by torch.mv and on an NVIDIA GPU by a loop of 16-byte loads, and
    copying, which moves every byte twice.
    """
    a = torch.ones(bytes // 4, device=device.type)
    b = torch.empty_like(a)
    matrix = a.view(torch.float16).view(-1, COLUMNS)
    row = torch.ones(COLUMNS, dtype=torch.float16, device=device.type)
    loops = []
    if device.type == "cuda":
        loop = Reader(a)
        loops.append(Probe("loop of 16-byte loads", loop, loop.bytes, device))
    return [
        *loops,
        Probe("torch sum f32", a.sum, bytes, device),
        Probe("torch amax f32", a.amax, bytes, device),
        Probe("torch.mv f16", lambda: torch.mv(matrix, row), bytes, device),
        Probe("copy", lambda: b.copy_(a), 2 * bytes, device),
    ]


def matrix_probe(device: Device, size: int, dtype: torch.dtype = torch.float16) -> Probe:
    a, b = (torch.randn(size, size, device=device.type).to(dtype) for _ in range(2))
    return Probe(f"{LABELS[dtype]} mm {size}³", lambda: a @ b, 2.0 * size**3, device)


def measure(
    device: Device,
    repetitions: int = 7,
    quick: bool = False,
    read_bytes: int | None = None,
    sizes: Sequence[int] | None = None,
) -> Roof:
    """Times all candidates on memory far larger than the cache; keeps the best of each kind.

    read_bytes, sizes of the matrices: in place of those that suit a GPU of a data centre.
    """
    read_bytes = read_bytes or max(MIN_BYTES, 8 * device.cache_bytes)
    memory = memory_probes(device, read_bytes >> (4 if quick else 0))
    matrix = [matrix_probe(device, n) for n in ((1024,) if quick else sizes or (4096, 8192))]
    return Roof.best([memory], [matrix], repetitions)

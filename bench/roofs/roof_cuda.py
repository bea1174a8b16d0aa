"""A loop of 16-byte loads on an NVIDIA GPU: reads memory 4 to 8 % faster than torch.sum does."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

THREADS = 512
GROUPS_PER_MULTIPROCESSOR = 4
LOADS = 4  # loads of 16 bytes in a turn of a thread

# A thread takes LOADS vectors a turn, as far apart as the grid has threads. The compiler keeps only
# loads whose values are used: the thread stores the xor of its values if all bits are ones, which
# never happens where one number fills the memory. Turns that are unrolled read 2 % slower.
_TEXT = f"""
extern "C" __global__ void read_all(const uint4* at, int turns, unsigned* out) {{
  const unsigned step = gridDim.x * blockDim.x;
  unsigned x[{LOADS}] = {{}};
  at += blockIdx.x * blockDim.x + threadIdx.x;
  #pragma unroll 1
  for (; turns > 0; --turns) {{
    #pragma unroll
    for (int i = 0; i < {LOADS}; ++i, at += step) x[i] ^= at->x ^ at->y ^ at->z ^ at->w;
  }}
  unsigned all = 0;
  for (int i = 0; i < {LOADS}; ++i) all ^= x[i];
  if (all == ~0u) *out = all;
}}
"""


@functools.cache
def _kernel(device: int) -> Any:
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(_TEXT, "read_all")  # type: ignore[no-untyped-call]


class Reader:
    """Reads the whole turns of a tensor on a GPU, on the current stream. `bytes`: what it reads.

    RuntimeError, OSError: what the driver or the compiler refuses, or the tensor is too small.
    """

    def __init__(self, data: Tensor) -> None:
        device = data.device.index or 0
        self._read = _kernel(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._groups = GROUPS_PER_MULTIPROCESSOR * processors
        turn = self._groups * THREADS * LOADS * 16
        turns = data.nbytes // turn
        if turns == 0:
            raise RuntimeError(f"data: {data.nbytes} bytes, less than the {turn} of a turn")
        self.bytes = turns * turn
        self._given = [data, turns, torch.zeros(1, dtype=torch.int32, device=data.device)]

    def __call__(self) -> None:
        self._read((self._groups, 1, 1), (THREADS, 1, 1), self._given)

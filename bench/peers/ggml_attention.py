"""ggml's flash attention on the CPU, on the bytes of our caches: one graph per cache."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ggml_library as ggml
from .ggml import Ggml

# Formats that it takes for keys and values, by the numbers that ggml has for them.
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}
_F32, _F16 = TYPES["f32"], TYPES["f16"]
MASK_ROWS = 64  # a mask's rows are a multiple


def missing(device: Any) -> str | None:
    """Why it does not run; None if it does."""
    return Ggml().missing(device)


class Attention:
    """softmax(q k / sqrt(D)) v of q f32 [B, heads, S, D], causal, with each of the caches."""

    def __init__(
        self, q: Tensor, caches: Sequence[tuple[Tensor, Tensor]], format: str, threads: int
    ) -> None:
        """caches: keys and values [B, kv_heads, T, row], which stay where they are."""
        self.q, self.caches, self.backend = q.contiguous(), caches, ggml.backend(threads)
        self.context = ggml.Context(4 * len(caches) + 2)
        batch, heads, queries, size = q.shape
        kv_heads, slots = caches[0][0].shape[1:3]
        given = self._placed(self.q, _F32, size, queries, heads, batch)
        mask = None
        if queries > 1:
            self.mask = causal_mask(queries, slots)
            mask = self._placed(self.mask, _F16, *reversed(self.mask.shape), 1, 1)
        self.graphs, results = [], []
        for keys, values in caches:
            shape = (TYPES[format], size, slots, kv_heads, batch)
            k, v = (self._placed(t, *shape) for t in (keys, values))
            y = ggml.call(
                *("flash_attn_ext", self.context.address, given, k, v, mask),
                *(size**-0.5, 0.0, 0.0),
            )
            graph = ggml.call("new_graph", self.context.address)
            ggml.call("build_forward_expand", graph, y)
            self.graphs.append(graph)
            results.append(y)
        self.context.allocate(ggml.call("cpu_buffer_type"))
        shape = (batch, queries, heads, size)
        self.results = [self._view(y, shape) for y in results]

    def _placed(self, t: Tensor, type: int, *sizes: int) -> int:
        """A tensor of ggml in the memory of t, sizes in ggml's order."""
        found: int = ggml.call("new_tensor_4d", self.context.address, type, *sizes)
        buffer = ggml.call("cpu_buffer_from_ptr", t.data_ptr(), t.nbytes)
        weakref.finalize(self, ggml.call, "buffer_free", buffer)
        if ggml.call("tensor_alloc", buffer, found, t.data_ptr()) != 0:
            raise MemoryError("ggml: no place for a tensor")
        return found

    def _view(self, y: int, shape: tuple[int, ...]) -> Tensor:
        memory = (ctypes.c_float * torch.Size(shape).numel()).from_address(ggml.call("get_data", y))
        return torch.frombuffer(memory, dtype=torch.float32).view(shape)

    def __call__(self, i: int) -> Tensor:
        """[B, S, heads, D] with cache i; valid until the next call with i."""
        if ggml.call("graph_compute", self.backend, self.graphs[i]) != 0:
            raise RuntimeError("ggml: graph_compute failed")
        return self.results[i]


def causal_mask(queries: int, slots: int) -> Tensor:
    """What is added to the scores of the last `queries` positions, f16 [rows, slots]."""
    rows = -(-queries // MASK_ROWS) * MASK_ROWS
    own = torch.arange(slots - queries, slots - queries + rows)[:, None]
    return torch.zeros(rows, slots, dtype=torch.float16).masked_fill_(
        torch.arange(slots)[None] > own, -torch.inf
    )

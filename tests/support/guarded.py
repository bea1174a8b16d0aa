"""Formats and ops with buffers against pages that may not be touched: a process that does, dies."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
from functools import partial

import torch
from backends import CPU
from inputs import activations, random_weight
from op_calls import op_calls
from oracle import check, linear, linear_of_rounded, spec
from torch import Tensor

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)
from torch_metalmm import _C, formats
from torch_metalmm.formats.activations import TOP_CODES

ops = torch.ops.metalmm

# Rows and dtype of x: every kernel for few rows, filled or not, and tiles.
CALLS = [(m, torch.float32) for m in (1, 2, 3, 4, 5, 6, 7, 8, 26)] + [
    (1, torch.bfloat16),
    (26, torch.bfloat16),
]

CALLS_OF_OPS = {dtype: op_calls(dtype) for dtype in (torch.float32, torch.bfloat16)}

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(t: Tensor, at_end: bool) -> Tensor:
    """A copy of t that ends right before (or begins right after) a page that may not be touched."""
    size = t.numel() * t.element_size()
    if not size:
        return t
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    total = room + 2 * mmap.PAGESIZE
    base = libc.mmap(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    first = base + mmap.PAGESIZE
    if libc.mprotect(first, room, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
    start = first + (room - size if at_end else 0)
    memory = (ctypes.c_uint8 * size).from_address(start)
    out = torch.frombuffer(memory, dtype=t.dtype).view(t.shape)
    return out.copy_(t)


def exercise(name: str) -> None:
    """Every op of one format; the values are checked too."""
    block = formats.get(name).block_values
    blocks = (1, 7, 33, 100, 545) if block == 1 else (1, 2, 3, 4, 512 // block + 1)
    for k in (block * b for b in blocks):
        packed = random_weight(name, 5, k, seed=k)
        values = spec(name, packed, k)
        for at_end in (True, False):
            w = guarded(packed, at_end)
            for m, dtype in CALLS if at_end else CALLS[-2:]:
                x = activations(m, k, dtype=dtype, seed=m)
                bias = activations(5, dtype=dtype, seed="bias")
                at = f"{name} {dtype} K={k} M={m}"
                x, bias = guarded(x, at_end), guarded(bias, at_end)
                wanted = {halved: linear(x, values, bias, halved) for halved in (False, dtype)}
                for strategy in CPU.strategies:
                    want = wanted[dtype if strategy == "dense" else False]
                    check(ops.linear(x, w, bias, name, strategy), want, f"{at} {strategy}")
                for kind in TOP_CODES if _C.has_integer_codes(name) else ():
                    want = linear_of_rounded(x, name, packed, kind).store(dtype)
                    for strategy in ("gemv", "gemv_batched", "gemm"):
                        y = ops.linear(x, w, None, name, strategy, activations=kind)
                        check(y, want, f"{at} {kind} {strategy}")
            ids = guarded(torch.tensor([4, 0, 4]), at_end)
            assert torch.equal(ops.embedding(ids, w, name, k), values[[4, 0, 4]])
            assert torch.equal(ops.dequantize(w, name, k), values)
            g = guarded(activations(2, 5, seed="g"), at_end)
            check(ops.linear_input_grad(g, w, name, k), linear(g, values.T), "grad")
            if formats.get(name).packs:
                source = guarded(activations(3, k, seed="q"), at_end)
                packed_again = ops.quantize(source, name)
                assert torch.equal(packed_again, formats.get(name).quantize(source)), "quantize"


def call(label: str) -> None:
    """The call of op_calls.py."""
    for calls in CALLS_OF_OPS.values():
        for at_end in (True, False):
            op, args, kwargs = calls[label]
            given = [guarded(a, at_end) if isinstance(a, Tensor) else a for a in args]
            op(*given, **kwargs)


def over_read() -> None:
    """Reads the byte behind a guarded buffer."""
    t = guarded(torch.zeros(100, dtype=torch.uint8), True)
    ctypes.string_at(t.data_ptr() + 100, 1)


def over_write(values: int) -> None:
    """Writes the byte behind a tensor of torch's own, as an op could behind its result."""
    t = torch.empty(values)
    ctypes.memset(t.data_ptr() + t.nbytes, 0, 1)
    del t


# The second lies at its page, the third is not a multiple of what tensors are aligned to.
TRAPS = {"read": over_read, "write": partial(over_write, 32), "near": partial(over_write, 33)}


def run(*names: str) -> None:
    """Traps, formats and calls of ops in turn, each named on a line before it runs."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if "LD_PRELOAD" in os.environ:
        libc.guard_heap()
    for name in names:
        print(name, flush=True)
        if name in TRAPS:
            TRAPS[name]()
        elif name in CALLS_OF_OPS[torch.float32]:
            call(name)
        else:
            exercise(name)

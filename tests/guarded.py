"""Runs every format with its buffers against pages that may not be touched. Used by test_matmul.

A forked child per format, so that an access beyond a buffer names the format and the others run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch
from oracle import FORMATS, activations, check, linear, random_weight, spec
from torch import Tensor

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)
from torch_metalmm import formats

ops = torch.ops.metalmm

# Rows and dtype of x: every kernel for few rows, filled or not, and tiles.
CALLS = [(m, torch.float32) for m in (1, 2, 3, 4, 5, 6, 7, 8, 26)] + [
    (1, torch.bfloat16),
    (26, torch.bfloat16),
]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(t: Tensor, at_end: bool) -> Tensor:
    """A copy of t that ends right before (or begins right after) a page that may not be touched."""
    size = t.numel() * t.element_size()
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
                want = linear(x, values, bias)
                x, bias = guarded(x, at_end), guarded(bias, at_end)
                for strategy in (None, "gemv", "gemv_batched", "gemm"):
                    check(ops.linear(x, w, bias, name, strategy), want, f"{name} K={k} M={m}")
            ids = guarded(torch.tensor([4, 0, 4]), at_end)
            assert torch.equal(ops.embedding(ids, w, name, k), values[[4, 0, 4]])
            assert torch.equal(ops.dequantize(w, name, k), values)
            g = guarded(activations(2, 5, seed="g"), at_end)
            check(ops.linear_input_grad(g, w, name, k), linear(g, values.T), "grad")
            source = guarded(activations(3, k, seed="q"), at_end)
            packed_again = ops.quantize(source, name)
            assert torch.equal(packed_again, formats.get(name).quantize(source)), "quantize"


def status_of(call: Callable[[], None]) -> str:
    """How a forked process that makes this call ended: "", the name of a signal, or "error"."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
                call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "error" if status else ""


def over_read() -> None:
    """Reads the byte behind a guarded buffer."""
    t = guarded(torch.zeros(100, dtype=torch.uint8), True)
    ctypes.string_at(t.data_ptr() + 100, 1)


def over_write() -> None:
    """Writes the byte behind a tensor of torch's own, as an op could behind its result."""
    t = torch.empty(33)
    ctypes.memset(t.data_ptr() + t.nbytes, 0, 1)
    del t


def main() -> int:
    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    traps = {"over_read": status_of(over_read), "over_write": status_of(over_write)}
    print(f"traps: {traps}")
    faulthandler.enable()
    failed = {name: status for name in FORMATS if (status := status_of(partial(exercise, name)))}
    print(f"{len(FORMATS)} formats, failed: {failed or 'none'}")
    return 1 if failed or traps["over_read"] not in ("SIGSEGV", "SIGBUS") else 0


if __name__ == "__main__":
    sys.exit(main())

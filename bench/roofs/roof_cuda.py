"""A loop of 16-byte loads on an NVIDIA GPU: reads memory 4 to 8 % faster than torch.sum does."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

THREADS = 512
GROUPS_PER_MULTIPROCESSOR = 4
LOADS = 4  # of 16 bytes, a turn of a thread
_SUCCESS = 0

# A thread takes LOADS vectors a turn, as far apart as the grid has threads. The compiler keeps only
# loads whose values are used: the thread stores the xor of its values if all bits are ones, which
# never happens where one number fills the memory.
_LOAD = """  ld.global.v4.u32 {{%a, %b, %c, %d}}, [%at];
  xor.b32 %a, %a, %b;
  xor.b32 %c, %c, %d;
  xor.b32 %a, %a, %c;
  xor.b32 %x{i}, %x{i}, %a;
  add.u64 %at, %at, %step;
"""
_PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry read_all(.param .u64 data, .param .u64 turns, .param .u64 out)
{
  .reg .u32 %a, %b, %c, %d, %x0, %x1, %x2, %x3, %id, %size, %groups;
  .reg .u64 %at, %step, %left, %wide, %to;
  .reg .pred %go;
  ld.param.u64 %at, [data];
  ld.param.u64 %left, [turns];
  ld.param.u64 %to, [out];
  mov.u32 %id, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %groups, %nctaid.x;
  mov.u32 %a, %tid.x;
  mad.lo.u32 %id, %id, %size, %a;
  mul.wide.u32 %wide, %id, 16;
  add.u64 %at, %at, %wide;
  mul.lo.u32 %size, %size, %groups;
  mul.wide.u32 %step, %size, 16;
  mov.u32 %x0, 0;
  mov.u32 %x1, 0;
  mov.u32 %x2, 0;
  mov.u32 %x3, 0;
$turn:
LOADS
  sub.u64 %left, %left, 1;
  setp.ne.u64 %go, %left, 0;
  @%go bra $turn;
  xor.b32 %x0, %x0, %x1;
  xor.b32 %x2, %x2, %x3;
  xor.b32 %x0, %x0, %x2;
  setp.eq.u32 %go, %x0, 4294967295;
  @%go st.global.u32 [%to], %x0;
  ret;
}
""".replace("LOADS\n", "".join(_LOAD.format(i=i) for i in range(LOADS)))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result != _SUCCESS:
        raise RuntimeError(f"{what}: CUDA error {result}")


@functools.cache
def _kernel(device: int) -> ctypes.c_void_p:
    """The loop, compiled for the context that torch has made on `device`."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), _PTX.encode()), "cuModuleLoadData")
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(function), module, b"read_all"),
            "cuModuleGetFunction",
        )
    return function


class Reader:
    """Reads the whole turns of a tensor on a GPU, on the current stream. `bytes`: what it reads.

    OSError: no CUDA driver. RuntimeError: what the driver refuses, or the tensor is too small.
    """

    def __init__(self, data: Tensor) -> None:
        device = data.device.index or 0
        self._function = _kernel(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._groups = GROUPS_PER_MULTIPROCESSOR * processors
        turn = self._groups * THREADS * LOADS * 16
        turns = data.nbytes // turn
        if turns == 0:
            raise RuntimeError(f"data: {data.nbytes} bytes, less than the {turn} of a turn")
        self.bytes = turns * turn
        self._data, self._out = data, torch.zeros(1, dtype=torch.int32, device=data.device)
        values = (data.data_ptr(), turns, self._out.data_ptr())
        self._values = [ctypes.c_uint64(v) for v in values]
        pointers = [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in self._values]
        self._parameters = (ctypes.c_void_p * len(pointers))(*pointers)

    def __call__(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        grid, group = (self._groups, 1, 1), (THREADS, 1, 1)
        _check(
            _driver().cuLaunchKernel(
                self._function, *grid, *group, 0, stream, self._parameters, None
            ),
            "cuLaunchKernel",
        )

"""The ceilings of this machine, measured in the run that uses them: of a CPU DRAM read and f32 FMA,
of a GPU memory read or copied and f16 matrix products; the fastest way counts."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .devices import CPU, Device
from .problem import LABELS
from .timing import Timed, Timing, interleave

SOURCE = Path(__file__).with_name("roof.cpp")
FLAGS = ["-O3", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-pthread"]
NATIVE = ("-march=native", "-mcpu=native")  # clang for aarch64 knows the second
_PREFIX = "roof: "
PROBE_SECONDS = 0.01  # longer than it takes to start threads


@dataclass(frozen=True)
class Probe:
    """A call whose work is known: bytes read or flops done."""

    name: str
    call: Callable[[], object]
    work: float
    device: Device = CPU

    def timed(self) -> Timed:
        return self.device.timed(lambda _: self.call())


@dataclass(frozen=True)
class Roof:
    """The best native and the best torch probe of each kind, to time beside the kernels: the faster
    counts. And what all candidates reached at the start."""

    read: list[Probe]
    fma: list[Probe]
    candidates: dict[str, float]  # GB/s, or GFLOP/s where the name begins with f32 or f16
    native: bool  # false: no compiler, torch ops only; the ceilings may be too low

    @staticmethod
    def best(
        read: list[list[Probe]], fma: list[list[Probe]], repetitions: int, native: bool = True
    ) -> Roof:
        """Times all probes in turns and keeps the fastest of each group."""
        probes = {p.name: p for group in read + fma for p in group}
        timings = interleave({name: p.timed() for name, p in probes.items()}, repetitions)
        rates = {name: probes[name].work / t.median / 1e9 for name, t in timings.items()}

        def fastest(groups: list[list[Probe]]) -> list[Probe]:
            return [max(group, key=lambda p: rates[p.name]) for group in groups]

        return Roof(fastest(read), fastest(fma), rates, native)

    def timed(self) -> dict[str, Timed]:
        """The probes, to be interleaved with the kernels."""
        return {_PREFIX + p.name: p.timed() for p in self.read + self.fma}

    def reached(self, timings: Mapping[str, Timing]) -> tuple[float, float]:
        """GB/s and GFLOP/s, from the timings of timed()."""

        def best(probes: list[Probe]) -> float:
            return max(p.work / timings[_PREFIX + p.name].median for p in probes) / 1e9

        return best(self.read), best(self.fma)


# ---- a CPU


def _compilers() -> list[list[str]]:
    found = [[path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))]
    if find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "c++"])
    return found


def _compile() -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "roof.so"
        for compiler, native in product(_compilers(), NATIVE):
            command = [*compiler, native, *FLAGS, str(SOURCE), "-o", str(library)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return _declare(ctypes.CDLL(str(library)))
    return None


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    lib.roof_buffer.argtypes, lib.roof_buffer.restype = [size], pointer
    lib.roof_read.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, size]
    lib.roof_read.restype = ctypes.c_uint64
    lib.roof_fma.argtypes, lib.roof_fma.restype = [ctypes.c_int64, ctypes.c_int], ctypes.c_double
    return lib


def _torch_readers(t: Tensor) -> list[Probe]:
    bits = t.view(torch.int64)
    ops = {"sum f32": t.sum, "max f32": t.max, "sum int64": bits.sum}
    return [Probe(f"torch {name}", call, t.nbytes) for name, call in ops.items()]


def _native_readers(
    lib: ctypes.CDLL, data: int, bytes: int, threads: int, quick: bool
) -> list[Probe]:
    def probe(streams: int, ahead: int, passes: int = 1) -> Probe:
        name = f"{streams} streams, prefetch {ahead} B"
        args = (data, bytes, passes, threads, streams, ahead)
        return Probe(name, lambda: lib.roof_read(*args), bytes * passes)

    first = probe(4, 0)
    seconds = interleave({"": first.timed()}, 3)[""].median
    passes = max(1, round(PROBE_SECONDS / seconds))
    grid = [(4, 0), (8, 512)] if quick else product((1, 2, 4, 8, 16), (0, 512, 1024))
    return [probe(streams, ahead, passes) for streams, ahead in grid]


def _native_fma(lib: ctypes.CDLL, threads: int) -> Probe:
    steps = 1 << 18
    flops = lib.roof_fma(steps, threads)
    seconds = interleave({"": Timed(lambda _: lib.roof_fma(steps, threads))}, 3)[""].median
    scaled = max(1, round(steps * PROBE_SECONDS / seconds))
    return Probe("f32 FMA", lambda: lib.roof_fma(scaled, threads), flops / steps * scaled)


def _sgemm(size: int) -> Probe:
    a, b = torch.randn(size, size), torch.randn(size, size)
    call = torch.nn.functional.linear
    return Probe(f"f32 F.linear {size}³", lambda: call(a, b), 2.0 * size**3)


def of_cpu(threads: int, cache_bytes: int, repetitions: int = 7, quick: bool = False) -> Roof:
    """Times all candidates on a buffer far larger than the cache; keeps the best of each kind."""
    bytes = (64 << 20) if quick else max(256 << 20, 8 * cache_bytes)
    lib = _compile()
    if lib is None:
        readers, flops = [_torch_readers(torch.ones(bytes // 4))], []
    else:
        data = lib.roof_buffer(bytes)
        if not data:
            raise MemoryError(f"no memory for the {bytes >> 20} MiB buffer of the DRAM read probe")
        t = torch.frombuffer((ctypes.c_char * bytes).from_address(data), dtype=torch.float32)
        readers = [_native_readers(lib, data, bytes, threads, quick), _torch_readers(t)]
        flops = [[_native_fma(lib, threads)]]
    flops.append([_sgemm(512 if quick else 1024)])
    return Roof.best(readers, flops, repetitions, native=lib is not None)


# ---- a GPU

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


def of_gpu(
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


# ---- an NVIDIA GPU: a loop of 16-byte loads, which reads 4 to 8 % faster than torch.sum does

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


def run(run: Any) -> Iterator[dict[str, Any]]:
    """The record of a run's roofs."""
    yield run.roof_record()

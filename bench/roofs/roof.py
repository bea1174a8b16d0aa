"""The ceilings of this machine, measured in the run that uses them: DRAM read, f32 FMA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..devices import CPU, Device
from ..timing import Timed, Timing, interleave

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


def measure(threads: int, cache_bytes: int, repetitions: int = 7, quick: bool = False) -> Roof:
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


def run(run: Any) -> Iterator[dict[str, Any]]:
    """The record of a run's roofs."""
    yield run.roof_record()

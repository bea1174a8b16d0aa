"""The machine, and the devices a run can use: where tensors lie, how the time of a call is read.

A GPU call is enqueued, not awaited, and one dispatch costs more than a small product: on cuda the
calls are captured in a graph and events time its replay, on mps many calls are awaited together.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import torch_metalmm
from torch_metalmm import _C
from torch_metalmm.engines import absence, check_device
from torch_metalmm.tools.cost_model import chosen

from .timing import Call, Found, Timed, wall_clock

# The folder that this one lies in: a clone, or an installation, whose bench has no pages.
ROOT = Path(__file__).resolve().parents[1]
# As it was called: bench of a clone, or the package's, which is the same folder by a link.
PROGRAM = "python -m bench" if __package__ == "bench" else "metalmm bench"
# The folder that either is imported from.
IMPORTED_FROM = Path(torch_metalmm.__file__).parents[1]

UNKNOWN_CACHE = 96 << 20  # larger than most: cold stays cold where the size cannot be read
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

MIN_CALLS = 16  # in a graph or a row, which share the cost of starting and awaiting
ROW_SECONDS = 0.03  # seconds of a row, to which a synchronize adds some 0.1 ms
# The facts of a device that plan() takes; the chip's numbers stand for facts not reported.
PLANNED_FOR = ("cores", "max_threadgroup_memory", "max_threads")
GPU_MAX_BURST = 4  # replays of a graph, or rows of calls, in a turn of a variant


# ---- the machine


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def need_clone(what: str) -> None:
    """ValueError: this is an installation, which lacks what `what` reads."""
    if not (ROOT / "bench" / "README.md").is_file():
        raise ValueError(f"{what}: works in a clone of the repository, not in an installation")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def last_level_cache() -> int:
    """Bytes of the largest cache of a core; UNKNOWN_CACHE if the system does not say."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*/size"):
        if found := re.fullmatch(r"(\d+)([KMG])", _read(index)):
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes) or UNKNOWN_CACHE


def cpu_name() -> str:
    """The CPU for people: its name, cores, and the instruction set in use."""
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        return f"{name}, {os.cpu_count()} cores, {_C.cpu_isa()}"
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE))
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return f"{name}, {os.cpu_count()} cores, {_C.cpu_isa()}"


def load_average() -> float:
    """Runnable processes of the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def describe(argv: Sequence[str], threads: int, name: str, cache_bytes: int) -> dict[str, Any]:
    """Date, commit, command, machine and versions of this run."""
    dirty = bool(_output("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "kind": "run",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": (_output("git", "rev-parse", "--short", "HEAD") or "unknown") + "+" * dirty,
        "command": shlex.join([*PROGRAM.split(), *argv]),
        "machine": name,
        "threads": threads,
        "cache_bytes": cache_bytes,
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": round(load_average(), 2),
    }


# ---- its devices


def captured(
    work: Callable[[], Found], before: Callable[[], object]
) -> tuple[torch.cuda.CUDAGraph, Found]:
    """work() as a graph of CUDA's, behind a call of before(); and what it gives, which each replay
    writes anew."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before()
    torch.cuda.current_stream().wait_stream(stream)
    # Only this thread's calls may break the capture: NCCL's watchdog asks for events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        given = work()
    return graph, given


class GpuTimed(Timed):
    """Seconds of a call among enough in a row to rotate over all copies."""

    pause = 0.0

    def __init__(self, call: Call, copies: int = 1) -> None:
        super().__init__(call, copies)
        self._calls = copies * max(1, -(-MIN_CALLS // copies))

    def _call_all(self) -> None:
        for i in range(self._calls):
            self.call(i % self.copies)

    def warm_up(self) -> None:
        self._set_burst(GPU_MAX_BURST)


class GraphTimed(GpuTimed):
    """The calls are a CUDA graph."""

    def warm_up(self) -> None:
        # Each copy is called before the capture, so that a first call compiles outside of it.
        each = lambda: [self.call(i) for i in range(self.copies)]  # noqa: E731
        self._graph, _ = captured(self._call_all, each)
        super().warm_up()

    def _once(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()  # type: ignore[no-untyped-call]
        self._graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        return float(start.elapsed_time(end)) / 1e3 / self._calls


class RowTimed(GpuTimed):
    """The calls lie in a row, on the host's clock, which stops when all of them are done.

    Events are not used: on torch 2.13 torch.mps.Event.synchronize() before elapsed_time() does not
    return (pytorch 162872), and the times of events hold the encoding as well. A call that the GPU
    finishes sooner than the host encodes it shows the encoding, about 2 to 10 µs.
    """

    def warm_up(self) -> None:
        for i in range(self.copies):  # compiles what is compiled at the first call
            self.call(i)
        torch.mps.synchronize()
        while self._once() * self._calls < ROW_SECONDS:
            self._calls *= 2
        self._burst = GPU_MAX_BURST

    def _once(self) -> float:
        def row() -> None:
            self._call_all()
            torch.mps.synchronize()

        return wall_clock(row) / self._calls


@dataclass(frozen=True)
class Device:
    """cpu, cuda or mps."""

    type: str = "cpu"

    @staticmethod
    def named(name: str) -> Device:
        """ValueError: an unknown device, or one that this machine or this build has not."""
        check_device(name)
        return Device(name)

    @staticmethod
    def default() -> str:
        """The device measured unless the command line says: the GPU of a Mac, else the CPU."""
        return "cpu" if absence("mps") else "mps"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x where the command line names none: what models run in on this device."""
        return torch.float32 if self.type == "cpu" else torch.float16

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.type == "cuda" else cpu_name()

    @property
    def cache_bytes(self) -> int:
        """Size of the cache that copies of W must exceed. Apple tells none; its largest: 96 MB."""
        if self.type == "cuda":
            return int(torch.cuda.get_device_properties().L2_cache_size)
        return UNKNOWN_CACHE if self.type == "mps" else last_level_cache()

    def strategy(self, **problem: Any) -> str:
        """The kernel chosen here for a linear: arguments as of _C.plan, strategy among them."""
        if self.type == "cpu":
            asked = problem.get("strategy")
            return str(asked or _C.cpu_strategy(problem.get("m", 1), problem["dtype"]))
        if self.type == "cuda":
            chip = _C.CUDA
            facts = {"cores": torch.cuda.get_device_properties().multi_processor_count}
        else:
            facts = _C.mps_facts()
            chip = facts["plans_for"]
        known = {name: facts[name] for name in PLANNED_FOR if facts.get(name)}
        plan = _C.plan(chip=chip, gpu=known, **problem)
        return chosen(plan)

    def timed(self, call: Call, copies: int = 1) -> Timed:
        kinds: dict[str, type[Timed]] = {"cpu": Timed, "cuda": GraphTimed, "mps": RowTimed}
        return kinds[self.type](call, copies)


CPU = Device()

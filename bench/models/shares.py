"""Where a token's time goes: products of packed weights, our other kernels, attention, all others.

On cuda the profiler names every kernel that runs. Elsewhere the calls of ops of one step are kept,
and those of each kind are called again in a row, without the Python between them: what a step takes
beyond the rows is the host's.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_metalmm import _C

from ..devices import Device
from ..timing import Timing, wall_clock

KINDS = ("packed", "ours", "attention", "others")
PRODUCTS = ("linear", "norm_linear", "swiglu", "swiglu_linear", "gemv", "gemm")
# Kernels of them that are not named after a strategy of `linear`.
PRODUCT_KERNELS = ("swiglu_up", "swiglu_down", "split_reduce")
ALLOCATES = ("empty", "new_empty", "detach", "lift_fresh", "_local_scalar_dense", "_unsafe_view")
ATTENTION = re.compile("attention|flash|fmha|sdpa", re.IGNORECASE)  # in names of ops and kernels
ROWS = 5  # times that each row is timed


@dataclass(frozen=True)
class Call:
    """An op and its arguments."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_view: bool = False  # the op's result lay in the memory of its arguments

    def __call__(self) -> Any:
        return self.op(*self.args, **self.kwargs)

    @property
    def kind(self) -> str | None:
        """The kind of the op, of KINDS; None for a view, or an op that only allocates."""
        return kind_of_op(self.name, self.is_view)

    @property
    def name(self) -> str:
        """The op's name, with its namespace."""
        return str(self.op._schema.name)


class Watch(TorchDispatchMode):
    """Keeps the calls of ops made inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # By what it did: to, reshape and contiguous copy or do not.
        is_view = gives_views(func._schema) and memory_of(result) <= memory_of((args, kwargs))
        self.calls.append(Call(func, args, kwargs or {}, is_view))
        return result


def gives_views(schema: Any) -> bool:
    """Whether an op of that schema may return memory of its arguments, which it does not write."""
    return any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def memory_of(values: object) -> set[int]:
    """The storages of the tensors in nested values."""
    leaves = (t for t in tree_leaves(values) if isinstance(t, Tensor))
    return {t.untyped_storage()._cdata for t in leaves}


@dataclass
class Shares:
    """Seconds and launches of each kind for one token, and passes of our ops (None: not known)."""

    seconds: dict[str, float]
    launches: dict[str, int]
    passes: int | None = None
    names: dict[str, float] = field(default_factory=dict)  # seconds by kernel
    ops: dict[str, int] = field(default_factory=dict)  # how often each op is called

    def record(self) -> dict[str, Any]:
        out: dict[str, Any] = {"passes": self.passes}
        for kind in KINDS:
            out[f"{kind}_ms"] = 1e3 * self.seconds[kind]
            out[f"{kind}_launches"] = self.launches[kind]
        out["by_name_us"] = {n: round(1e6 * s, 2) for n, s in self.names.items()}
        out["ops"] = self.ops
        return out


def watched(step: Callable[[], object]) -> list[Call]:
    """The calls of one step."""
    with Watch() as watch:
        step()
    return watch.calls


def in_rows(calls: Sequence[Call], device: Device) -> Shares:
    """Times of the calls of each kind in a row, each row ROWS times: the medians."""
    rows = {kind: [c for c in calls if c.kind == kind] for kind in KINDS}
    synchronize = getattr(torch, device.type).synchronize

    def once(row: list[Call]) -> float:
        if not row:
            return 0.0

        def work() -> None:
            for call in row:
                call()
            synchronize()

        synchronize()
        return wall_clock(work)

    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in range(ROWS + 1):
        for kind, row in rows.items():
            seconds = once(row)
            if i:
                samples[kind].append(seconds)
    times = {kind: Timing.of(found).median for kind, found in samples.items()}
    return Shares(times, {kind: len(row) for kind, row in rows.items()})


def recorded_passes(calls: Iterable[Call], chip: str, cores: int = 0) -> int:
    """The dispatches that our ops among the calls make on a chip: recorded, nothing is computed."""

    def empty(t: Tensor) -> Tensor:
        if t.dtype == torch.long:  # ids, slots and lengths, which are checked, and decide passes
            return t.cpu().clone()
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")

    _C.install_recorder(chip, cores)
    try:
        for call in calls:
            if call.op.namespace == "metalmm":
                args, kwargs = tree_map_only(Tensor, empty, (call.args, call.kwargs))
                kwargs.pop("activations", None)  # a chip has no other than exact ones
                call.op(*args, **kwargs)
    finally:
        recorded = _C.remove_recorder()
    return sum(found[0] == "dispatch" for found in recorded)


def kind_of_kernel(name: str) -> str:
    """The kind, of KINDS, of a kernel on a GPU by its name."""
    if ATTENTION.search(name):
        return "attention"
    if name not in _our_kernels():
        return "others"
    products = (*_C.strategies(), *PRODUCT_KERNELS)
    return "packed" if name.startswith(tuple(f"{p}_" for p in products)) else "ours"


@functools.cache
def _our_kernels() -> frozenset[str]:
    return frozenset(_C.kernel_names())


def kind_of_op(name: str, is_view: bool) -> str | None:
    """The kind, of KINDS, of an op by its name; None for an op that computes nothing."""
    namespace, _, op = name.partition("::")
    if ATTENTION.search(op):
        return None if is_view else "attention"
    if namespace == "metalmm":
        return "packed" if op in PRODUCTS else "ours"
    if is_view or op.startswith(ALLOCATES):
        return None
    return "others"


def of_trace(events: Iterable[dict[str, Any]], steps: int) -> Shares:
    """The shares of one of `steps` tokens in the events of a trace of the profiler."""
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = [(e, kind_of_kernel(e["name"])) for e in found]
    counted = sorted(kernels, key=lambda pair: float(pair[0]["ts"]))
    launches, names = Counter(kind for _, kind in counted), Counter[str]()
    for event, _ in counted:
        names[event["name"]] += 1e-6 * event["dur"] / steps
    # Steps are alike; the median of each kind leaves out what interrupted one of them.
    parts = steps if len(counted) % steps == 0 else 1
    size = len(counted) // parts
    chunks = [counted[i * size : (i + 1) * size] for i in range(parts)]
    seconds = {}
    for kind in KINDS:
        sums = [sum(e["dur"] for e, k in chunk if k == kind) for chunk in chunks]
        seconds[kind] = 1e-6 * median(sums) * parts / steps
    return Shares(seconds, {k: round(launches[k] / steps) for k in KINDS}, None, dict(names))


def profiled(step: Callable[[], object], steps: int = 8) -> Shares:
    """The shares that the profiler sees in `steps` steps on cuda."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return of_trace(events, steps)


def of_system(system: Any, token: int, device: Device, chip: str) -> Shares:
    """The shares of a system that runs a transformers model, in the middle of a sequence."""

    def step() -> None:
        system.feed([token])

    if not system.is_eager:
        return profiled(step)
    calls = watched(step)
    cores = 0
    if device.type == "cuda":
        chip, cores = _C.CUDA, torch.cuda.get_device_properties().multi_processor_count
    elif device.type == "mps":
        chip = _C.mps_facts()["plans_for"]
    shares = profiled(step) if device.type == "cuda" else in_rows(calls, device)
    shares.passes = recorded_passes(calls, chip, cores)
    shares.ops = dict(Counter(call.name for call in calls if call.kind))
    return shares

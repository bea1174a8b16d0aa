"""Torch's own graphs, where it has some: a list of launches as one launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
AFTER = 2  # runs of a list, with which allocators and libraries are warm


class Firsts(threading.local):
    """count: what this thread has recorded, run before its graph, or captured: each takes longer
    than it will from then on."""

    count = 0


firsts = Firsts()


class CudaGraph:
    """The launches of run(), whose tensors are the same in each call, as a graph of CUDA's.

    Captured on a stream of its own, beside which other threads go on with theirs.
    """

    def __init__(self, run: Callable[[], list[Tensor]], device: torch.device, shown: int) -> None:
        """shown: of the last so many results the list's own tensors are shown."""
        self._shown = shown
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._results = run()
                finally:
                    self._graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)

    def run(self) -> list[Tensor]:
        """New tensors, as run() gives them, but for those that are shown."""
        self._graph.replay()
        count = len(self._results) - self._shown
        return [t.clone() for t in self._results[:count]] + self._results[count:]


class _Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """fits: whether a graph does what the ops inside do, as none waits for values that the device
    computes, and none reads or makes what is on another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type, self.fits = device.type, True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        is_here = all(t.device.type == self._type for t in tensors)
        self.fits &= is_here and not _OF_VALUES.intersection(function.tags)
        return out


# Graphs by type of device. MPS gets its own when torch has released one (pull request 189019).
GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}


class Runs:
    """A list that is run for each step: by itself, then as a graph where its device has those.

    The last run before says whether it can be one.
    """

    def __init__(self, run: Callable[[], list[Tensor]], device: torch.device, shown: int) -> None:
        self._run, self._device, self._shown, self._count = run, device, shown, 0
        self._kind = GRAPHS.get(device.type)
        self.graph: CudaGraph | None = None
        self.refusal = ""  # of torch, to capture the list

    def __call__(self) -> list[Tensor]:
        if self.graph is not None:
            return self.graph.run()
        if self._kind is None:
            return self._run()
        firsts.count += 1
        self._count += 1
        if self._count < AFTER:
            return self._run()
        if self._count == AFTER:
            with _Looks(self._device) as looks:
                results = self._run()
            self._kind = self._kind if looks.fits else None
            return results
        try:
            self.graph = self._kind(self._run, self._device, self._shown)
        except RuntimeError as error:
            self._kind, self.refusal = None, str(error).partition("\n")[0]
            return self._run()
        return self.graph.run()

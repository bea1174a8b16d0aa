"""Torch's own graphs, where it has some: a list of launches as one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
AFTER = 2  # runs of a list, with which allocators and libraries are warm


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


def _waits(name: str) -> bool:
    """Whether the host waits for what an op, "aten::nonzero", computes, by its tags."""
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    return any(_OF_VALUES.intersection(getattr(packet, o).tags) for o in packet.overloads())


# By type of device. MPS gets its own here when torch has released one (pull request 189019).
GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}


class Runs:
    """A list that is run for each step: by itself, then as a graph where its device has those.

    called: the names of torch's ops in it. With one that waits for values there is no graph.
    """

    def __init__(
        self,
        run: Callable[[], list[Tensor]],
        device: torch.device,
        called: Iterable[str],
        shown: int,
    ) -> None:
        self._run, self._device, self._shown, self._count = run, device, shown, 0
        self._kind = None if any(map(_waits, set(called))) else GRAPHS.get(device.type)
        self.graph: CudaGraph | None = None
        self.refusal = ""  # of torch, to capture the list

    def __call__(self) -> list[Tensor]:
        if self.graph is not None:
            return self.graph.run()
        self._count += 1
        if self._kind is None or self._count <= AFTER:
            return self._run()
        try:
            self.graph = self._kind(self._run, self._device, self._shown)
        except RuntimeError as error:
            self._kind, self.refusal = None, str(error).partition("\n")[0]
            return self._run()
        return self.graph.run()

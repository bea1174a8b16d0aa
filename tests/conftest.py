"""The engines under test: one suite runs on each of them that this machine has.

A test that takes `backend` runs once per engine; one that also takes `strategy` runs once per
engine and strategy, None (the engine's own choice) included. METALMM_TEST_BACKENDS=cpu,mps names
the engines to run; without it all that this machine has run. Naming an absent one is an error.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)
from torch_metalmm import _C, testing


@dataclass(frozen=True)
class Backend:
    """An engine: where its tensors live, what can be forced, where its loops end."""

    name: str
    device: str
    strategies: tuple[str, ...]
    absent: Callable[[], str]  # why it does not run here; "" if it does
    m_edges: tuple[int, ...]  # rows of x: tiles, and where the choice of strategy changes
    n_edges: tuple[int, ...]  # rows of W
    k_edges: tuple[int, ...]  # values of K

    def put(self, t: Tensor) -> Tensor:
        """t on this engine's device."""
        return t.to(self.device)

    def put_view(self, view: Tensor) -> Tensor:
        """view on this engine's device, with its strides, offset and neighbours in memory."""
        memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
        return self.put(memory).as_strided(view.shape, view.stride(), view.storage_offset())


def leaf(t: Tensor, backend: Backend) -> Tensor:
    """t on the engine's device, requiring a gradient of its own."""
    return backend.put(t).detach().requires_grad_()


def _dispatch_absent(key: str, device_runs: Callable[[], bool]) -> Callable[[], str]:
    def absent() -> str:
        if not torch._C._dispatch_has_kernel_for_dispatch_key("metalmm::linear", key):
            return "this build has no kernels for it"
        return "" if device_runs() else "no such device"

    return absent


def around(edge: int) -> tuple[int, ...]:
    """The sizes around an edge at which a loop runs short, full, over and twice over."""
    return tuple(n for n in (edge - 1, edge, edge + 1, 2 * edge + 1) if n > 0)


# Edges of the CPU engine: kDotRows and kMaxBatchedRows, panels of up to 4 x 4 .. 2 x 16 columns,
# kBlockColumns; rows per dot pass, tile_rows, kBlockRows; kChunk, kDecodeK.
CPU = Backend(
    name="cpu",
    device="cpu",
    strategies=("gemv", "gemv_batched", "gemm"),
    absent=_dispatch_absent("CPU", lambda: True),
    m_edges=(2, 4, 8, 16, 24, 32, 256),
    n_edges=(4, 6, 12, 48),
    k_edges=(32, 512),
)

# In the order they run. A part that adds an engine adds a row.
BACKENDS = {b.name: b for b in (CPU,)}

# Engines that a build may have and that have no row yet: named as absent in the report.
_PLANNED = {
    "emulator": lambda: testing.absence() or "its tests drive it directly, see testing.emulated",
    "cuda": _dispatch_absent("CUDA", torch.cuda.is_available),
    "mps": _dispatch_absent("MPS", torch.backends.mps.is_available),
}


def absences() -> dict[str, str]:
    """{engine: why it is absent}, "" for those that run here."""
    return {n: b.absent() for n, b in BACKENDS.items()} | {n: f() for n, f in _PLANNED.items()}


def select(asked: str | None) -> list[Backend]:
    """The engines to run; pytest.UsageError if `asked` ("cpu,mps") names none or an absent one."""
    why = absences()
    if asked is None:
        return [b for n, b in BACKENDS.items() if not why[n]]
    names = [n.strip() for n in asked.split(",") if n.strip()]
    for name in names:
        if name not in why:
            raise pytest.UsageError(
                f"METALMM_TEST_BACKENDS: unknown '{name}'; known: {', '.join(why)}"
            )
        if why[name]:
            raise pytest.UsageError(f"METALMM_TEST_BACKENDS: {name} is absent: {why[name]}")
        if name not in BACKENDS:
            raise pytest.UsageError(
                f"METALMM_TEST_BACKENDS: {name} runs here but has no row in BACKENDS"
            )
    if not names:
        raise pytest.UsageError("METALMM_TEST_BACKENDS: names no engine")
    return [BACKENDS[n] for n in names]


SELECTED: list[Backend] = []


def _describe() -> str:
    runs = ", ".join(f"{b.name} ({_C.cpu_isa()})" if b is CPU else b.name for b in SELECTED)
    absent = ", ".join(f"{n} ({why})" for n, why in absences().items() if why)
    idle = ", ".join(n for n, b in BACKENDS.items() if not b.absent() and b not in SELECTED)
    return f"engines: {runs}; absent: {absent or 'none'}" + (
        f"; not asked for: {idle}" if idle else ""
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "isa: also run under every other instruction set, by test_isa"
    )
    SELECTED[:] = select(os.environ.get("METALMM_TEST_BACKENDS"))


def pytest_report_header(config: pytest.Config) -> str:
    return _describe()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "strategy" in metafunc.fixturenames:
        pairs = [(b, s) for b in SELECTED for s in (None, *b.strategies)]
        ids = [f"{b.name}-{s or 'auto'}" for b, s in pairs]
        metafunc.parametrize(("backend", "strategy"), pairs, ids=ids)
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", SELECTED, ids=[b.name for b in SELECTED])


@pytest.fixture(autouse=True)
def _count_cells(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    if "backend" in request.fixturenames:
        record_property("engine", request.getfixturevalue("backend").name)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: on a shared machine the threads of short calls wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Also where the header is not shown (-q): an engine that did not run must be seen.
    cells: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get(
        "failed", []
    ):
        if report.when == "call":
            cells.update(str(v) for name, v in report.user_properties if name == "engine")
    counts = ", ".join(f"{n} ran {c} tests" for n, c in cells.items()) or "no test took an engine"
    terminalreporter.write_line(f"{_describe()}; {counts}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where there is no emulator, the files that use it or its compiler are left out."""
    if not testing.absence() or collection_path.suffix != ".py":
        return None
    uses = (
        r"^from (torch_metalmm\.(testing|msl_\w+)|shaders) import|^from torch_metalmm import .*ptx"
    )
    return True if re.search(uses, collection_path.read_text(), re.M) else None

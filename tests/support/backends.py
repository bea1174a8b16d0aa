"""The engines under test: one suite runs on each of them that this machine has.

A test that takes `backend` runs once per engine; one that also takes `strategy` runs once per
engine and strategy, None (the engine's own choice) included. METALMM_TEST_BACKENDS=cpu,mps names
the engines to run; without it all that this machine has run. Naming an absent one is an error.

The emulator runs on every machine: where it cannot be built, tests fail. A module marked
`schedules` runs on it a second time, the last thread first and without subnormals, as on Apple's
GPUs.

A test marked `formats` takes `name`, a format of each decode struct; one marked `every_format`
takes all. The group and the scales of an affine format choose no code: they are variables of the
CPU's and of the emulator's kernels, and function constants on a GPU, which compiles a pipeline of
each; one marked `every_pipeline` takes all there. With METALMM_TEST_CASES=all mps takes all formats
everywhere, in thousands of pipelines that Metal compiles one by one; with METALMM_TEST_CASES=quick
(`make quick`) the CPU takes a format of each family, the emulator one, each with every strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from inputs import long_k, short_k
from kernel_cases import CHIP
from oracle import DTYPES, FORMATS, Halved
from plan_cases import codecs, strategies_used
from torch import Tensor

from torch_metalmm import _C, formats, testing
from torch_metalmm.engines import absence
from torch_metalmm.testing import emulated

# {decode struct's name: its formats}: of an affine one every group with every type of scales.
VARIANTS = {c: [n for n in FORMATS if n == c or n.startswith(c + "_g")] for c in codecs()}

# A format of every decode struct; affine ones take turns in groups and types of scales. A row
# of the table without a class has none: test_table.py names the row.
ONE_OF_EACH = tuple(of[(4 * i + 3) % len(of)] for i, of in enumerate(VARIANTS.values()) if of)

# {format: its family, a module of the specification}, and a format of each.
FAMILY = {name: type(formats.get(name)).__module__ for name in FORMATS}
ONE_OF_FAMILY = tuple({FAMILY[name]: name for name in ONE_OF_EACH}.values())

CASES = os.environ.get("METALMM_TEST_CASES") or None


@dataclass(frozen=True)
class Edges:
    """Sizes at which the loops of an engine end."""

    m: tuple[int, ...]  # rows of x: tiles, and where the choice of strategy changes
    n: tuple[int, ...]  # rows of W
    k: tuple[int, ...]  # values of K


@dataclass(frozen=True)
class Backend:
    """An engine: where its tensors live, what can be forced, where its loops end."""

    name: str
    device: str
    strategies: tuple[str, ...]
    absent: Callable[[], str]  # why it does not run here; "" if it does
    edges: Callable[[str | None], Edges]  # of a strategy, or of the engine's own choice
    chip: Callable[[], str] = str  # what it plans for; "" if it does not plan
    flushes: bool = False  # subnormals of f32 and bf16: oracle.flushed_spec
    is_slow: bool = False  # takes fewer cases, chosen so that every kernel is run
    # The formats of the tests so marked:
    formats: tuple[str, ...] = ONE_OF_EACH
    every_pipeline: tuple[str, ...] = ONE_OF_EACH
    every_format: tuple[str, ...] = FORMATS
    entered: Callable[[], AbstractContextManager[None]] = nullcontext  # around each of its tests

    def k(self, name: str) -> int:
        """A K for a test of something else than the loops over K."""
        return short_k(name) if self.is_slow else long_k(name)

    def halves(
        self, strategy: str | None, dtype: torch.dtype, name: str, mnk: tuple[int, int, int]
    ) -> Halved:
        """What is rounded beside the sums of x of this dtype and W of this format."""
        m, n, k = mnk
        label = next(label for label, t in formats.DTYPES.items() if t == dtype)
        if not self.chip():
            return dtype if (strategy or _C.cpu_strategy(m, label)) == "dense" else False
        sizes = {"m": m, "n": n, "k": k, "format": name, "dtype": label}
        plan = _C.plan(**sizes, chip=self.chip(), strategy=strategy)
        if plan["dense"]:
            return dtype
        tiles = any(_C.strategy(s)["rounds_to_half"] for s in strategies_used(plan))
        return tiles and dtype == torch.float16

    def dtype(self, name: str, strategy: str | None) -> torch.dtype:
        """Of x, in a test of something else."""
        compiles = self.is_slow and self.chip()
        return compiled_dtype(name, strategy) if compiles else torch.float32

    def put(self, t: Any) -> Any:
        """A tensor on this engine's device; None and others as they are."""
        return t.to(self.device) if isinstance(t, Tensor) else t

    def put_view(self, view: Any) -> Any:
        """As put(), a tensor with its strides, offset and neighbours in memory."""
        if not isinstance(view, Tensor):
            return view
        memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
        return self.put(memory).as_strided(view.shape, view.stride(), view.storage_offset())


def leaf(t: Tensor, backend: Backend) -> Tensor:
    """t on the engine's device, requiring a gradient of its own."""
    moved: Tensor = backend.put(t)
    return moved.detach().requires_grad_()


def around(edge: int) -> tuple[int, ...]:
    """The sizes around an edge at which a loop runs short, full, over and twice over."""
    return tuple(n for n in (edge - 1, edge, edge + 1, 2 * edge + 1) if n > 0)


# Edges of the CPU engine: kDotRows and kMaxBatchedRows, panels of up to 4 x 4 .. 2 x 16 columns,
# kTaskColumns; rows per dot pass, tile_rows, kTaskRows; kChunkValues, kDecodeK.
_CPU_EDGES = Edges(m=(2, 4, 8, 16, 24, 32, 256), n=(4, 6, 12, 48), k=(32, 512))

CPU = Backend(
    name="cpu",
    device="cpu",
    # test_baselines has the others
    strategies=("gemv", "gemv_steps", "gemv_batched", "gemm", "dense"),
    absent=partial(absence, "cpu"),
    edges=lambda _: _CPU_EDGES,
    # Forced, on a machine that has better: the templates of the others, a value at a time.
    is_slow=_C.cpu_isa() == "scalar" != _C.cpu_isas()[0],
    every_format=FORMATS if _C.cpu_isa() == _C.cpu_isas()[0] else ONE_OF_EACH,
)

_SHADER_STRATEGIES = tuple(_C.strategies("linear"))


def compiled_dtype(name: str, strategy: str | None) -> torch.dtype:
    """Of x, where a kernel is compiled for a test: families of formats take turns."""
    turn = [*dict.fromkeys(FAMILY.values())].index(FAMILY[name])
    turn += _SHADER_STRATEGIES.index(strategy or "gemv")
    return DTYPES[turn % len(DTYPES)]


def _shader_edges(strategy: str | None) -> Edges:
    """The tile of a strategy (metal/geometry.h), of all of them where it has none of its own."""
    own = strategy is not None and _C.strategy(strategy)["family"] == "matmul"
    of = (strategy,) if own else _SHADER_STRATEGIES
    rows = [row for row in map(_C.strategy, of) if row["family"] == "matmul"]
    m, n, k = ({row[size] for row in rows if row[size] > 1} for size in "mnk")
    return Edges(tuple(sorted(m)) or (1,), tuple(sorted(n)), tuple(sorted(k)))


_EMULATED = "m1"

EMULATOR = Backend(
    name="emulator",
    device="cpu",
    strategies=_SHADER_STRATEGIES,
    absent=testing.absence,
    edges=_shader_edges,
    chip=lambda: _EMULATED,
    is_slow=True,
    entered=partial(emulated, checked=True, chip=_EMULATED),
)
DESCENDING = replace(
    EMULATOR,
    name="emulator-descending",
    entered=partial(emulated, descending=True, flush_subnormals=True, chip=_EMULATED),
    flushes=True,
    every_format=ONE_OF_EACH,
)


def takes_fewer_cases(asked: str | None) -> bool:
    """Whether mps does: unless METALMM_TEST_CASES is "all"; pytest.UsageError if it is unknown."""
    if asked not in (None, "all", "quick"):
        raise pytest.UsageError(f"METALMM_TEST_CASES: '{asked}'; allowed: all, quick")
    return asked != "all"


def formats_of(backend: Backend, mark: str) -> tuple[str, ...]:
    """What a test so marked takes as `name` on this engine."""
    if CASES == "quick":
        return ONE_OF_FAMILY[1:2] if backend.is_slow else ONE_OF_FAMILY
    every: tuple[str, ...] = getattr(backend, mark)
    return every


def shader_engine(device: str, chip: Callable[[], str], is_slow: bool = False) -> Backend:
    return Backend(
        name=device,
        device=device,
        strategies=_SHADER_STRATEGIES,
        absent=partial(absence, device),
        edges=_shader_edges,
        chip=chip,
        flushes=device == "mps",
        is_slow=is_slow,
        formats=ONE_OF_EACH if is_slow else FORMATS,
        every_pipeline=FORMATS,
    )


# In the order they run.
BACKENDS = {
    b.name: b
    for b in (
        CPU,
        EMULATOR,
        shader_engine("cuda", lambda: CHIP),
        shader_engine(
            "mps",
            lambda: _C.mps_facts()["plans_for"],
            takes_fewer_cases(CASES),
        ),
    )
}


def absences() -> dict[str, str]:
    """{engine: why it is absent}, "" for those that run here."""
    return {name: b.absent() for name, b in BACKENDS.items()}


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
    if not names:
        raise pytest.UsageError("METALMM_TEST_BACKENDS: names no engine")
    return [BACKENDS[n] for n in names]


SELECTED: list[Backend] = []


def engines_of(schedules: bool) -> list[Backend]:
    """The selected engines; the emulator twice where a test runs under both schedules."""
    twice = schedules and CASES != "quick"
    both = (EMULATOR, DESCENDING) if twice else (EMULATOR,)
    return [b for one in SELECTED for b in (both if one is EMULATOR else (one,))]

"""Which tests run on which engine (support/backends.py), and what every test finds in place."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import hypothesis
import pytest
import support  # noqa: F401  (its modules by their plain names)
import torch
from backends import BACKENDS, CPU, SELECTED, absences, engines_of, formats_of, select
from covering import covered

import torch_metalmm  # noqa: F401  (registers torch.ops.metalmm)
from torch_metalmm import _C, testing


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
    config.addinivalue_line("markers", "schedules: also run on the emulator, last thread first")
    config.addinivalue_line("markers", "quick: run by `make quick`, before a commit")
    config.addinivalue_line("markers", "formats: takes `name`, a format of each decode struct")
    config.addinivalue_line("markers", "every_pipeline: takes `name`, every format on a GPU")
    config.addinivalue_line("markers", "every_format: takes `name`, every format")
    config.addinivalue_line("markers", "covering: of a product of parameters, every pair")
    config.addinivalue_line("markers", "shaders: covering, of kernels that are compiled")
    os.environ.pop("FORCE_COLOR", None)  # what commands print is compared
    # A process of pytest per core: threads of torch, here and in the processes that tests start,
    # would spin for each other. Tests of threads set their number.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if not shutil.which("g++"):  # torch.compile looks for no other by itself
        os.environ.setdefault("CXX", "c++")
    # The same examples in every run, however slow the machine.
    hypothesis.settings.register_profile("metalmm", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("metalmm")
    SELECTED[:] = select(os.environ.get("METALMM_TEST_BACKENDS"))
    gc.disable()  # until pytest_collection_finish: nearly all that is made stays


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and cases stay until the end: a collection of garbage visits them no more.

    Python visits all others once a quarter as many are new, which without modules and cases is
    soon; the threshold makes it later.
    """
    gc.freeze()
    gc.set_threshold(5000)
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    return _describe()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """backend, and with it strategy and name where the test takes them: each case that runs."""
    if "backend" not in metafunc.fixturenames:
        return
    marked = {mark.name for mark in metafunc.definition.iter_markers()}
    by_name = [mark for mark in ("formats", "every_pipeline", "every_format") if mark in marked]
    by_strategy = ["strategy"] if "strategy" in metafunc.fixturenames else []
    cases, ids = [], []
    for backend in engines_of("schedules" in marked):
        strategies = [(None, *backend.strategies)] if by_strategy else []
        rows = list(product(*strategies, *(formats_of(backend, mark) for mark in by_name)))
        cases += [(backend, *row) for row in rows]
        ids += ["-".join((backend.name, *(part or "auto" for part in row))) for row in rows]
    metafunc.parametrize(("backend", *by_strategy, *(["name"] * len(by_name))), cases, ids=ids)


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = covered(items)
    left_out = {*items} - {*run}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = run


@pytest.fixture(autouse=True)
def _on_engine(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[None]:
    """The test's engine, counted for the report, and in place while the test runs."""
    if "backend" not in request.fixturenames:
        yield
        return
    backend = request.getfixturevalue("backend")
    record_property("engine", backend.name)
    with backend.entered():
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A test may set the number of torch's threads, which is the process's."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """No messages and no progress bars of transformers."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(verbosity)


@pytest.fixture
def own_threads() -> Iterator[None]:
    """In inference mode, as a command of bench runs."""
    with torch.inference_mode():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Shown also where the header is not (-q): an engine that did not run must be seen.
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
    uses = r"^from (torch_metalmm\.(testing|msl(\.\w+)?)|shaders) import"
    return True if re.search(uses, collection_path.read_text(), re.M) else None

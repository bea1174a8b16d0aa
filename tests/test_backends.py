"""The choice of engines: what is asked for runs or is an error, never silently nothing."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import backends
import pytest
import torch
from backends import (
    BACKENDS,
    CPU,
    DESCENDING,
    EMULATOR,
    ONE_OF_EACH,
    SELECTED,
    Backend,
    absences,
    around,
    engines_of,
    formats_of,
    select,
    shader_engine,
    takes_fewer_cases,
)
from conftest import pytest_ignore_collect
from places import ROOT, TESTS
from plan_cases import codecs

from torch_metalmm import formats, testing

pytestmark = pytest.mark.quick


def test_what_runs_here_is_selected() -> None:
    """Without a choice every engine of this machine that has a row; cpu is one."""
    runs = [name for name, why in absences().items() if not why and name in BACKENDS]
    assert [b.name for b in select(None)] == runs and "cpu" in runs
    assert [b.name for b in select(" cpu,")] == ["cpu"]
    assert SELECTED


@pytest.mark.parametrize("asked", ["", ",", "cpu,tpu", "CPU"])
def test_a_choice_of_nothing_known_is_an_error(asked: str) -> None:
    with pytest.raises(pytest.UsageError, match="names no engine|unknown '(tpu|CPU)'; known: cpu"):
        select(asked)


def test_an_absent_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error and no skip: who asks for an engine wants its result."""
    monkeypatch.setitem(BACKENDS, "gone", replace(CPU, name="gone", absent=lambda: "far away"))
    absent = {name: why for name, why in absences().items() if why}
    assert absent["gone"] == "far away" and "gone" not in {b.name for b in select(None)}
    for name, why in absent.items():
        with pytest.raises(pytest.UsageError, match=f"{name} is absent: {re.escape(why)}"):
            select(f"cpu,{name}")


def test_mps_runs_the_cases_of_the_emulator() -> None:
    """One format of each struct, unless METALMM_TEST_CASES or the test asks for all."""
    assert BACKENDS["mps"].is_slow is (os.environ.get("METALMM_TEST_CASES") != "all")
    assert takes_fewer_cases(None) and not takes_fewer_cases("all")
    with pytest.raises(pytest.UsageError, match="METALMM_TEST_CASES: 'many'; allowed: all, quick"):
        takes_fewer_cases("many")
    few, every = (shader_engine("mps", str, is_slow=slow) for slow in (True, False))
    assert few.k("q4_k") == EMULATOR.k("q4_k") < CPU.k("q4_k") == every.k("q4_k")
    assert few.formats == EMULATOR.formats == EMULATOR.every_pipeline == ONE_OF_EACH
    for of in (few.every_pipeline, few.every_format, EMULATOR.every_format, every.formats):
        assert list(of) == formats.names()


def test_one_format_of_each_struct_and_every_kind_of_affine() -> None:
    """What most tests take: all groups and all types of scales are among them."""
    affine = [f for f in map(formats.get, ONE_OF_EACH) if isinstance(f, formats.Affine)]
    assert len(ONE_OF_EACH) == len(codecs()) == len(set(ONE_OF_EACH))
    for what in ("bits", "block_values", "dtype"):
        every = {getattr(formats.get(n), what) for n in formats.names() if n.startswith("affine")}
        assert {getattr(f, what) for f in affine} == every


def test_quick_takes_a_format_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make quick`: the emulator takes one that is packed; neither runs a second schedule."""
    monkeypatch.setattr(backends, "CASES", "quick")
    families = [type(formats.get(n)).__module__ for n in formats_of(CPU, "every_format")]
    assert families == list(dict.fromkeys(type(formats.get(n)).__module__ for n in ONE_OF_EACH))
    (one,) = formats_of(EMULATOR, "formats")
    assert formats.get(one).block_values > 1
    assert engines_of(True) == SELECTED


def test_the_second_schedule_follows_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second schedule runs where a test asks for it, with fewer formats."""
    monkeypatch.setattr(backends, "CASES", None)
    assert engines_of(False) == SELECTED
    twice = engines_of(True)
    assert [b for b in twice if b is not DESCENDING] == SELECTED
    if EMULATOR in SELECTED:
        assert twice[twice.index(EMULATOR) + 1] is DESCENDING
    assert DESCENDING.every_format == ONE_OF_EACH


def test_the_strategies_are_those_of_the_engine(backend: Backend) -> None:
    """The error of the op names them; the tests force all but the baselines of the CPU."""
    x = backend.put(torch.ones(1, 1))
    with pytest.raises(ValueError, match="strategy: unknown 'x' .*allowed: ") as caught:
        torch.ops.metalmm.linear(x, x, None, "f32", "x")
    allowed = str(caught.value).splitlines()[0].split("allowed: ")[1]
    baselines = ("gemm_tiled", "gemm_naive") if backend is CPU else ()
    assert sorted(allowed.split(", ")) == sorted((*backend.strategies, *baselines))


def test_sizes_around_an_edge() -> None:
    assert around(8) == (7, 8, 9, 17) and around(1) == (1, 2, 3)


def test_files_that_need_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac the files are left out; files that every engine runs stay."""
    files = {f.stem: f for f in TESTS.rglob("test_*.py")}
    emulated = ("test_msl", "test_lockstep", "test_shader_gemm", "test_mps_encode", "test_ptx")
    others = ("test_exact", "test_matmul", "test_ops", "test_autograd", "test_linear")
    monkeypatch.setattr(testing, "absence", lambda: "")
    assert all(pytest_ignore_collect(files[f]) is None for f in emulated)
    monkeypatch.setattr(testing, "absence", lambda: "no Linux")
    assert all(pytest_ignore_collect(files[f]) for f in emulated)
    assert all(pytest_ignore_collect(files[f]) is None for f in (*others, "test_backends"))
    assert pytest_ignore_collect(TESTS) is None


def test_nothing_forks() -> None:
    """On a Mac a forked process may not use Apple's frameworks: it is killed, or hangs.

    test_saves_strace.py runs on Linux only, and so does the server of support/models/ranks.py,
    which spawns on a Mac, as spawn() of torch.multiprocessing does.
    """
    forking = re.compile(
        r"os\.fork|preexec_fn|ProcessPoolExecutor|set_start_method|get_context\(\"fork"
        r"|\b(mp|multiprocessing)\.(Process|Pool)\b"
    )
    folders = ("tests", "bench", "torch_metalmm")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py") if f != Path(__file__)]
    assert files and not [
        f for f in files if forking.search(f.read_text()) and "strace" not in f.name
    ]

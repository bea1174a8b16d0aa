"""The choice of engines: what is asked for runs or is an error, never silently nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from backends import (
    CPU,
    Backend,
)
from places import ROOT

pytestmark = pytest.mark.quick


def test_the_strategies_are_those_of_the_engine(backend: Backend) -> None:
    """The error of the op names them; the tests force all but the baselines of the CPU."""
    x = backend.put(torch.ones(1, 1))
    with pytest.raises(ValueError, match="strategy: unknown 'x' .*allowed: ") as caught:
        torch.ops.metalmm.linear(x, x, None, "f32", "x")
    allowed = str(caught.value).splitlines()[0].split("allowed: ")[1]
    baselines = ("gemm_tiled", "gemm_naive") if backend is CPU else ()
    assert sorted(allowed.split(", ")) == sorted((*backend.strategies, *baselines))


def test_nothing_forks() -> None:
    """On a Mac a forked process may not use Apple's frameworks: it is killed, or hangs.

    The servers of support/models/ranks.py and of support/forked.py start each process anew on a
    Mac, as spawn() of torch.multiprocessing does.
    """
    forking = re.compile(
        r"os\.fork|preexec_fn|ProcessPoolExecutor|set_start_method|get_context\(\"fork"
        r"|\b(mp|multiprocessing)\.(Process|Pool)\b"
    )
    folders = ("tests", "bench", "torch_metalmm")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py") if f != Path(__file__)]
    assert files and not [
        f for f in files if f.name != "forked.py" and forking.search(f.read_text())
    ]

"""bench tokens --tp: both numbers of processes, ours and transformers', right and in one table."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from measured import records_of

from bench.devices import Device
from bench.models import ranks
from bench.options import parse
from bench.runner import Run

TWO = ("tokens", "--device", "cpu", "--formats", "q4_0", "--tp", "2", "--prompt", "40")


@pytest.fixture
def forked(own_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes are forks of one that has imported what each needs; on a Mac each is new."""
    method = "spawn" if sys.platform == "darwin" else "forkserver"
    mp.get_context(method).set_forkserver_preload([ranks.__name__])
    forks = functools.partial(mp.start_processes, start_method=method)
    monkeypatch.setattr(mp, "spawn", forks)


@pytest.mark.usefixtures("forked")
def test_tokens_of_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {r["system"]: r for r in records_of(tmp_path, *TWO) if r["kind"] == "tokens"}
    names = ("metalmm q4_0", "metalmm q4_0, fuse_", "transformers f32")
    assert list(found) == [f"{n}, {c}" for c in ("1 process", "2 processes") for n in names]
    for name in names:
        one, two = found[f"{name}, 1 process"], found[f"{name}, 2 processes"]
        assert 1.9 < one["weight_bytes"] / two["weight_bytes"] <= 2
        assert one["ok"] and two["ok"] and one["decode"] > 0 and two["prefill"] > 0
    assert found["metalmm q4_0, 2 processes"]["error"] > 0  # compared with other sums
    assert "metalmm q4_0, fuse_, 2 processes" in capsys.readouterr().out


def job(count: int) -> ranks.Job:
    return ranks.Job("8b", ("q4_0",), "cuda", torch.float16, 40, 40, 8, 1, 1, True, "", count)


def test_what_does_not_run() -> None:
    """One of two processes without memory: the other waits for it, and must be ended."""
    full, other = torch.OutOfMemoryError("no room\nfor it"), RuntimeError("cannot capture")
    with pytest.raises(torch.OutOfMemoryError):
        ranks.skipped(job(2), "ours", full)
    for of, error, why in ((job(1), full, "no room"), (job(2), other, "cannot capture")):
        found = ranks.skipped(of, "ours", error)
        assert (found["kind"], found["why"]) == ("skipped", why)
        assert found["what"] == f"8b, ours, {of.over}"


def test_fewer_gpus_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = parse(["tokens", "--device", "cuda", "--tp", "2", "--models", "tiny"])
    monkeypatch.setattr("bench.runner.Device.named", lambda name: Device(name))
    with pytest.raises(ValueError, match="--tp 2: 1 GPUs"):
        next(ranks.run(Run(args)))

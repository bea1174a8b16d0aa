"""bench tokens --tp: both numbers of processes, ours and transformers', right and in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.models import ranks


@pytest.mark.usefixtures("own_threads")
def test_tokens_of_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "records.json"
    options = "--quick --device cpu --threads 1 --models tiny --formats q4_0 --tp 2 --prompt 40"
    assert main(["tokens", *options.split(), "--json", str(file)]) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = {r["system"]: r for r in records if r["kind"] == "tokens"}
    names = ("metalmm q4_0", "metalmm q4_0, fuse_", "transformers f32")
    assert list(found) == [f"{n}, {c}" for c in ("1 process", "2 processes") for n in names]
    for name in names:
        one, two = found[f"{name}, 1 process"], found[f"{name}, 2 processes"]
        assert 1.9 < one["weight_bytes"] / two["weight_bytes"] <= 2
        assert one["ok"] and two["ok"] and one["decode"] > 0 and two["prefill"] > 0
    assert found["metalmm q4_0, 2 processes"]["error"] > 0  # compared with other sums
    assert "metalmm q4_0, fuse_, 2 processes" in capsys.readouterr().out


class Processes:
    """A mesh as far as its size."""

    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count


def test_what_does_not_run() -> None:
    """One of two processes without memory: the other waits for it, and must be ended."""
    full, other = torch.OutOfMemoryError("no room\nfor it"), RuntimeError("cannot capture")
    with pytest.raises(torch.OutOfMemoryError):
        ranks.skipped("8b", "ours", Processes(2), full)
    for count, error, why in ((1, full, "no room"), (2, other, "cannot capture")):
        found = ranks.skipped("8b", "ours", Processes(count), error)
        assert (found["kind"], found["why"]) == ("skipped", why)
        assert found["what"].startswith(f"8b, ours, {count} process")


@pytest.mark.parametrize("given", [["--tp", "1"], ["--tp", "2", "--models", "smollm2"]])
def test_what_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "--quick", "--device", "cpu", *given]) == 2
    assert "--tp" in capsys.readouterr().err

"""When the Metal engine gives the GPU what it has encoded, recorded on Linux."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from places import ROOT

from torch_metalmm import _C

ops = torch.ops.metalmm
VARIABLE = "METALMM_COMMIT_EVERY"


def recorded(tokens: int) -> list[str]:
    """The names of the encoder calls that end or commit a pass, of as many linears."""
    x, w = torch.ones(1, 32), torch.ones(2, 32)
    _C.install_recorder()
    try:
        for _ in range(tokens):
            ops.linear(x, w, None, "f32")
    finally:
        calls: list[Any] = _C.remove_recorder()
    return [call[0] for call in calls if call[0] in ("dispatch", "commit")]


@pytest.mark.parametrize("every", [1, 3, 12])
def test_every_n_passes(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has work after n passes, not after the last."""
    monkeypatch.setenv(VARIABLE, str(every))
    period = [*["dispatch"] * every, "commit"]
    assert recorded(2 * every + every // 2) == [*period, *period, *["dispatch"] * (every // 2)]


def test_a_plan_of_two_passes_is_not_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split-K's sums and what adds them are committed together."""
    monkeypatch.setenv(VARIABLE, "1")
    x, w = torch.ones(1, 65536), torch.ones(4, 65536)
    _C.install_recorder("m4-max")
    try:
        ops.linear(x, w, None, "f32")
    finally:
        calls = [call[0] for call in _C.remove_recorder()]
    assert [c for c in calls if c in ("dispatch", "commit")] == ["dispatch", "dispatch", "commit"]


def test_zero_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert recorded(100) == ["dispatch"] * 100


@pytest.mark.parametrize("text", [None, ""])
def test_the_default_is_the_one_of_the_table(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    rows = re.findall(r"^MM_COMMIT\((\d+)\)$", (ROOT / "csrc/plan/tuning.def").read_text(), re.M)
    assert [_C.commit_every()] == list(map(int, rows))


@pytest.mark.parametrize("text", ["-1", "x", " 3", "3.0", "1000001", "99999999999999999999", "0x3"])
def test_what_is_no_number_of_passes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, its value and what is allowed, before anything is encoded."""
    monkeypatch.setenv(VARIABLE, text)
    message = f"{VARIABLE}: '{re.escape(text)}' must be a whole number .* from 0 .* to 1000000"
    with pytest.raises(ValueError, match=message):
        _C.commit_every()
    with pytest.raises(ValueError, match=message):
        _C.install_recorder()

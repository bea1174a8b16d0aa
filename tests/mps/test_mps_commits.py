"""When the Metal engine gives the GPU what it has encoded, recorded on Linux."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from places import ROOT
from recorder import recorded

from torch_metalmm import _C

ops = torch.ops.metalmm
VARIABLE = "METALMM_COMMIT_EVERY"


def commits_of(*tokens: int, pause: int = 0) -> list[str]:
    """The names of the encoder calls that end or commit a pass: of so many linears, a pause of so
    many microseconds, so many linears, ..."""
    x, w = torch.ones(1, 32), torch.ones(2, 32)
    with recorded() as calls:
        for i, count in enumerate(tokens):
            if i:
                _C.recorder_waits(pause)
            for _ in range(count):
                ops.linear(x, w, None, "f32")
    return ends(calls)


def ends(calls: list[Any]) -> list[str]:
    return [call[0] for call in calls if call[0] in ("dispatch", "commit")]


def groups(calls: list[str]) -> list[int]:
    """The dispatches before each commit."""
    text = "".join("d" if call == "dispatch" else "c" for call in calls)
    return [len(group) for group in text.split("c")[:-1]]


@pytest.mark.parametrize("every", [1, 3, 12])
def test_every_n_passes(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has work after n passes, not after the last."""
    monkeypatch.setenv(VARIABLE, str(every))
    period = [*["dispatch"] * every, "commit"]
    assert commits_of(2 * every + every // 2) == [*period, *period, *["dispatch"] * (every // 2)]


def test_a_plan_of_two_passes_is_not_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split-K's sums and what adds them are committed together."""
    monkeypatch.setenv(VARIABLE, "1")
    x, w = torch.ones(1, 65536), torch.ones(4, 65536)
    with recorded("m4-max") as calls:
        ops.linear(x, w, None, "f32")
    assert ends(calls) == ["dispatch", "dispatch", "commit"]


@pytest.mark.parametrize("text", ["0", "1000000"])
def test_zero_and_the_most_leave_it_to_torch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert commits_of(100) == ["dispatch"] * 100


@pytest.mark.parametrize("text", [None, ""])
def test_groups_grow_until_somebody_waits(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of 200 passes is five commits; after a pause the first group is the smallest again,
    with what was left of the last."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    table = (ROOT / "csrc/plan/tuning.def").read_text()
    (row,) = re.findall(r"^MM_COMMIT\((\d+), (\d+), (\d+)\)$", table, re.M)
    first, most, pause = map(int, row)
    grown = [first * 2**i for i in range(9) if first * 2**i < most] + [most] * 9
    left = 200 - sum(grown[:5])
    assert 0 < left < most
    assert groups(commits_of(200)) == grown[:5]
    assert groups(commits_of(200, 100, pause=pause + 100)) == [*grown[:5], left + 1, 2 * first, 32]
    assert groups(commits_of(200, 100, pause=pause - 50)) == [*grown[:5], most]


@pytest.mark.parametrize("text", ["-1", "x", " 3", "3.0", "1000001", "99999999999999999999", "0x3"])
def test_what_is_no_number_of_passes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, its value and what is allowed, before anything is encoded."""
    monkeypatch.setenv(VARIABLE, text)
    message = f"{VARIABLE}: '{re.escape(text)}' must be a whole number .* from 0 .* to 1000000"
    with pytest.raises(ValueError, match=message):
        _C.install_recorder()

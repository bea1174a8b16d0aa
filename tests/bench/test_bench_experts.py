"""`python -m bench experts`: what is checked, and what stands beside what."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured import records_of

from bench.ops.experts import Data
from bench.problem import Setting

pytestmark = pytest.mark.usefixtures("own_threads")


def test_a_token_and_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token has bytes and a roof; a prompt, linear of as many products."""
    records = records_of(tmp_path, "experts", "--formats", "q4_0,q8_0", "--markdown")
    cells = [r for r in records if r["kind"] == "experts"]
    ways = {1: ["swiglu", "down"], 16: ["swiglu", "down", "experts", "same_work", "one_expert"]}
    assert [(r["format"], r["tokens"], r["variant"]) for r in cells] == [
        (name, count, way) for name in ("q4_0", "q8_0") for count in (1, 16) for way in ways[count]
    ]
    assert all(r.get("ok", True) and r["us"] > 0 for r in cells)
    assert all(("of_same_work" in r) == (r["variant"] == "experts") for r in cells)
    token = cells[0]
    chosen = 2 * 128 * (256 // 32 * 18)  # two experts of 128 rows of 256 values
    assert token["gbs"] == pytest.approx(chosen / token["us"] / 1e3, rel=1e-3)
    assert "linear of the same work" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["swiglu", "down"])
def test_a_wrong_product_is_found(name: str) -> None:
    data = Data((4, 2, 64, 256), "q8_0", 3, Setting(threads=1, cold_bytes=1))
    call = data.calls()[name]
    assert data.check(name, call)["ok"]
    assert not data.check(name, lambda i: 1.01 * call(i))["ok"]

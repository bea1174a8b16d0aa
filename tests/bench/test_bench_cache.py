"""`python -m bench cache`: bytes are counted, answers compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from measured import records_of

from bench.__main__ import main
from bench.models import cache_cost
from bench.options import parse
from bench.report import model_tables
from bench.runner import Run
from torch_metalmm import formats
from torch_metalmm.hf.caches import pair_of

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.mark.parametrize("name", ["f16", "q8_0", "q8_0/affine4_g64"])
def test_bytes_of_a_context(name: str) -> None:
    """Those of the 8B shape: 32 layers of 8 heads of 128 keys and 128 values."""
    found = cache_cost.memory(name)
    both = ("f16", "q8_0") if name == "q8_0" else (name.split("/")[0], name.split("/")[-1])
    token = 32 * 8 * sum(formats.get(each).row_bytes(128) for each in both)
    assert found["token"] == token
    assert found["sizes"] == {str(slots): slots * token for slots in cache_cost.SLOTS}


def test_a_run_has_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = records_of(tmp_path, "cache", "--formats", "f32,q4_0/q4_0")
    assert [r["kind"] for r in records[1:3]] == ["cache-bytes"] * 2
    dynamic, exact, rounded = [r for r in records if r["kind"] == "cache-quality"]
    assert dynamic["divergence"] == 0 and dynamic["equal"] == [4] * cache_cost.PROMPTS
    assert exact["perplexity"] == pytest.approx(dynamic["perplexity"], rel=1e-5)
    assert exact["same_top"] == 1 and exact["equal"] == dynamic["equal"]
    assert 0.01 < rounded["divergence"] < 1 and 0.5 < rounded["same_top"] < 1
    assert "kB a token" in capsys.readouterr().out


def test_tokens_before_the_first_difference() -> None:
    a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 7, 4])
    assert (cache_cost.equal(a, a), cache_cost.equal(a, b), cache_cost.equal(a, a + 1)) == (4, 2, 0)


def test_a_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parts run, and the run says which did not."""

    def missing() -> Path:
        raise FileNotFoundError("no demo model: pip install it")

    monkeypatch.setattr(cache_cost, "demo_model", missing)
    found = [
        *cache_cost.run(Run(parse(["cache", "--quick", "--formats", "f16", "--device", "cpu"])))
    ]
    assert found[1:] == [{"kind": "skipped", "what": "SmolLM2", "why": "pip install it"}]


def test_parts_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--parts", "bytes", "--formats", "q8_0", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "kB a token" in printed and "perplexity" not in printed


def test_every_default_format_fits_the_models() -> None:
    """Blocks that divide the heads of the 8B shape and of SmolLM2."""
    args = parse(["cache", "--device", "cpu"])
    pairs = [pair_of(name) for name in cache_cost.named(args.formats)]
    blocks = [formats.get(name).block_values for pair in pairs for name in pair]
    assert len(pairs) == 17 and not any(128 % n or 64 % n for n in blocks)


def test_a_table_without_f16() -> None:
    record: dict[str, Any] = {"kind": "cache-bytes", "format": "q8_0", "token": 1000.0}
    (table,) = model_tables([record | {"sizes": {"8192": 8e6}}])
    assert table.columns == ["cache", "kB a token", "GB of 8k tokens"]
    assert table.rows == [["q8_0", "1.00", "0.00800"]]

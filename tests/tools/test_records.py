"""Records of `metalmm bench` that were written: read again, compared, refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from failing import failure

from torch_metalmm.bench.devices import CPU
from torch_metalmm.bench.standard import record
from torch_metalmm.tools.cli import main

Record = dict[str, Any]


def product(m: int, us: float) -> Record:
    """One that is the whole layer."""
    sizes = {"shape": "attn", "m": m, "n": 8, "k": 32, "weight_bytes": 144}
    times = {"us": us, "us_q1": us, "us_q3": us, "roof_us": 1.0, "predicted_us": None}
    return {"variant": "metalmm q4_0", "format": "q4_0", "ok": True} | sizes | times


@pytest.fixture
def written() -> Record:
    token = {"model": "a Llama", "format": "q4_k", "context": 32, "ms": 9.0, "ok": True}
    return record.facts(CPU, "f32", 2, 8e9, False) | {
        "model": None,
        "roofs": {"read_gb_s": 10.0, "gflop_s": 100.0, "mm_gflop_s": {"f32": 90.0}},
        "layer": {"attn": 1},
        "products": [product(1, 40.0), product(8, 90.0)],
        "tokens": [token | {"form": form} for form in ("unfused", "fused")],
        "skipped": [],
    }


def test_two_records_are_compared(
    tmp_path: Path, written: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = [c | {"us": 2 * c["us"]} for c in written["products"]]
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    record.write(paths[0], written)
    record.write(paths[1], written | {"products": slower, "chip": "Apple M0"})
    assert main(["bench", "compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"layer, metalmm q4_0, M = 1, µs\W+40\.0\W+80\.0\W+2\.00", out)
    assert re.search(r"^second: Apple M0, ", out, re.M) and "memory, GB/s" in out
    assert "two records" in failure(capsys, "bench", "compare", paths[0])
    roofs = written["roofs"]
    bad = {
        "[1]": "not a record of metalmm bench",
        "{": "a.json: it is no JSON: Expecting property name",
        "[" * 10**5: "a.json: it is no JSON: RecursionError",
        json.dumps(written | {"schema": 2}): "schema 2; this version reads 1",
        json.dumps(written | {"products": None}): "missing or of another type: products",
        json.dumps(written | {"is_quick": True}): "they measure different things",
        json.dumps(written | {"roofs": {}}): "a.json: it lacks what is compared: KeyError",
        json.dumps(written | {"products": [1]}): "a.json: it lacks what is compared",
        json.dumps(written | {"roofs": roofs | {"gflop_s": 0}}): "must be more than 0 and finite",
        json.dumps(written | {"roofs": roofs | {"gflop_s": "x"}}): "it lacks what is compared",
    }
    for text, why in bad.items():
        paths[0].write_text(text)
        assert why in failure(capsys, "bench", "compare", *paths)


def test_a_record_of_another_writes_text_alone(
    tmp_path: Path, written: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    """No markup of tables, no characters that a terminal obeys."""
    rates = {"mm_gflop_s": {"[/b] f32\x1b[2J": 1.0}}
    path = tmp_path / "a.json"
    strange = {"chip": "\x1b]0;M4\x07", "roofs": written["roofs"] | rates}
    record.write(path, written | strange)
    assert main(["bench", "compare", str(path), str(path)]) == 0
    out = capsys.readouterr().out
    assert "torch.mm [/b] f32" in out and "M4" in out
    assert not set(out) & {"\x1b", "\x07"}


def test_tokens_of_another_context_are_another_figure(written: Record) -> None:
    longer = [t | {"context": 2 * t["context"]} for t in written["tokens"]]
    first, second = (record.figures(r) for r in (written, written | {"tokens": longer}))
    names = {name for name in first if name.startswith("token")}
    assert len(names) == len(longer) and names.isdisjoint(second)


def test_a_record_that_is_cut_off_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), record.replaced(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    with record.replaced(path) as part:
        part.write_text("whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]

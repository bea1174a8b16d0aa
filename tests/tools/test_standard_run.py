"""`metalmm bench`: what it writes, what it refuses, and the predictions beside its times."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import failure

from torch_metalmm import _C
from torch_metalmm.bench.devices import CPU, Device
from torch_metalmm.bench.models import llamas
from torch_metalmm.bench.problem import Setting, Shape, Variant
from torch_metalmm.bench.standard import products, record, run, show, stack
from torch_metalmm.tools.cli import main
from torch_metalmm.tools.cost_model import LAUNCH_US, REACHED, Chip
from torch_metalmm.tools.token_time import token_time

Record = dict[str, Any]
M4_MAX = {"name": "Apple M4 Max", "plans_for": "m4-max", "cores": 32}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, short."""
    folder = tmp_path_factory.mktemp("record")
    assert main(["bench", "--quick", "--formats", "Q4_0,q8_0", "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def written(made: Path) -> Record:
    (path,) = made.glob("*.json")
    return dict(json.loads(path.read_text()))


def cell(shape: str, m: int, us: float, **fields: Any) -> Record:
    """A product as the record has it; F.linear takes 100 µs, the roofs allow 1."""
    found = {"variant": "metalmm q4_0", "format": "q4_0", "engine": "metalmm"} | fields
    times = {"us": us, "us_q1": us - 1, "us_q3": us + 3, "speedup": 100 / us, "roof_us": 1.0}
    sizes = {"shape": shape, "m": m, "n": 8, "k": 32, "weight_bytes": 144}
    return {"predicted_us": None, "ok": True, "worst": 0.1} | sizes | times | found


@pytest.fixture
def invented(written: Record) -> Record:
    """A record whose figures are known: a layer of two kinds of products, and predictions."""
    changed = {
        "is_quick": False,
        "model": {"name": "m4-max", "cores": 32, "bandwidth_gb_s": 546},
        "layer": {"attn": 2, "kv": 1},
        "products": [
            *(cell("attn", 1, 10.0, predicted_us=5.0), cell("kv", 1, 20.0, predicted_us=10.0)),
            cell("attn", 8, 30.0, predicted_us=5.0),
        ],
    }
    return written | changed


@pytest.fixture
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that takes no file, not even from a superuser, where the system has one."""
    if Path("/proc/self").is_dir():
        return Path("/proc")
    folder = tmp_path_factory.mktemp("closed")
    folder.chmod(0o500)
    return folder


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from strings(part)


def test_a_record_has_its_fields_and_nothing_of_its_owner(made: Path, written: Record) -> None:
    assert written.keys() == record.FIELDS.keys() and record.wrong_fields(written) == []
    words = {word for text in strings(written) for word in text.split()}
    assert "cpu" in words and not [word for word in words if os.path.isabs(word)]
    assert words.isdisjoint({socket.gethostname(), getpass.getuser(), str(made)})
    name = re.fullmatch(r"metalmm-bench-([a-z0-9-]+)-(\d{4}-\d\d-\d\d)", next(made.glob("*")).stem)
    assert name and name[2] == written["date"]
    assert {f.suffix for f in made.iterdir()} == {".json", ".png"}


def test_a_record_has_what_was_asked_for(written: Record) -> None:
    cells = {(c["m"], c["format"]) for c in written["products"]}
    assert cells == {(m, f) for m in products.QUICK_MS for f in ("q4_0", "q8_0", "")}
    assert all(c["ok"] and c["us"] > 0 and c["roof_us"] > 0 for c in written["products"])
    assert [(t["form"], t["ok"]) for t in written["tokens"]] == [("unfused", True), ("fused", True)]
    assert written["skipped"] == [] and written["model"] is None
    assert {"f32", "bf16"} == written["roofs"]["mm_gflop_s"].keys()


def test_a_layer_is_the_sum_of_its_products(invented: Record) -> None:
    """Those with 8 rows of x lack a shape: there is no sum."""
    (layer,) = record.layers(invented)
    assert (layer.m, layer.us, layer.predicted_us, layer.roof_us) == (1, 40.0, 20.0, 3.0)
    assert (layer.linear_us, layer.speedup, layer.spread) == (300.0, 7.5, 12.0)
    assert layer.weight_bytes == 3 * 144
    table = show.layer_table(invented)
    assert table.columns[-2:] == ["predicted", "measured / predicted"]
    assert table.rows == [
        ["metalmm q4_0", "1", "40.0", "30 %", "0.0108", "7.50×", "8 %", "20.0", "2.00"]
    ]
    alone = show.layer_table(invented | {"model": None})
    assert alone.rows == [table.rows[0][:-2]] and len(alone.columns) == 7


def test_the_bounds_of_a_cell() -> None:
    """A chip that reads 1 GB/s: the product takes the time of its bytes, W's and x's and y's."""
    chip = replace(Chip.named("m1"), bandwidth_gb_s=1.0)
    sizes = {"m": 1, "n": 4096, "k": 4096}
    one = cell("attn", 1, 10.0) | sizes | {"weight_bytes": 4096 * 128 * 18}
    one |= {"roof_gbs": 2.0, "roof_gflops": 1.0}
    found = products.with_bounds(one, chip, "f16")
    plan = _C.plan(**sizes, format="q4_0", dtype="f16", chip="m1", gpu={"cores": chip.cores})
    moved = 4096 * 128 * 18 + (4096 + 4096) * 2
    assert found["predicted_us"] == moved / (1e3 * REACHED) + LAUNCH_US * len(plan["passes"])
    assert found["roof_us"] == 2 * 4096 * 4096 / 1e3  # 1 GFLOP/s, longer than 2 GB/s allow
    assert products.with_bounds(one, None, "f16")["predicted_us"] is None
    linear = one | {"engine": "torch", "format": ""}
    assert products.with_bounds(linear, chip, "f16")["predicted_us"] is None
    wrong = {"ok": False}
    assert products.with_bounds(wrong, chip, "f16") == wrong


@pytest.mark.parametrize(
    ("facts", "cores"),
    [(M4_MAX, 32), (M4_MAX | {"cores": 0}, 40), (M4_MAX | {"name": "Apple M9 Max"}, None)],
)
def test_the_chip_of_the_model(
    monkeypatch: pytest.MonkeyPatch, facts: Record, cores: int | None
) -> None:
    """With the cores that the device reports; none for a chip that only plans like a known one."""
    monkeypatch.setattr(_C, "mps_facts", lambda: facts, raising=False)
    found = products.chip_of(Device("mps"))
    assert (found and found.cores) == cores and products.chip_of(CPU) is None
    head = record.facts(Device("mps"), "f16", 1, 48e9, False)
    assert (head["chip"], head["cores"]) == (facts["name"], facts["cores"])
    name = str(facts["name"]).lower().replace(" ", "-")
    assert record.file_name(head) == f"metalmm-bench-{name}-{head['date']}"


def test_layers_that_fit() -> None:
    shape, setting = llamas.SHAPES["8b"], Setting(1, 1)
    layer = (2 * (32 + 8) * 128 * 4096 + 3 * 4096 * 14336 + 2 * 4096) * 144 / 256
    beside = (2 * 128256 * 4096 + 4096) * 144 / 256
    fast = {"gflop_s": 1e9, "read_gb_s": 1e9}
    for count, fit in ((3.5, 3), (0.5, 0), (40, 32)):
        memory = (beside + count * layer) / stack.MEMORY_PART
        assert stack.layers_of(shape, setting, memory, fast) == fit
    assert stack.layers_of(shape, setting, 1e15, {"gflop_s": 1e9, "read_gb_s": 1e-3}) == 0
    assert stack.layers_of(shape, setting, 1e15, {"gflop_s": 1e-3, "read_gb_s": 1e9}) == 0
    (nothing,) = stack.run(setting, 0.0, fast, None, False, lambda _: None)
    assert nothing["kind"] == "skipped" and nothing["what"] == "tokens"


def test_the_prediction_of_a_token() -> None:
    chip = Chip.named("m1")
    with torch.inference_mode():
        given = ({"gflop_s": 1e3, "read_gb_s": 1e3}, chip, True, lambda _: None)
        found = [*stack.run(Setting(1, 1), 64e9, *given)]
    for token in found:
        wanted = token_time(llamas.SHAPES["tiny"], "q4_k", chip, token["form"], context=32)
        assert token["predicted_ms"] == wanted.total / 1e3 and token["ms"] > 0


def test_a_product_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CELL_SECONDS", 0.0)
    roofs = {"gflop_s": 100.0, "read_gb_s": 10.0}
    given = (("q4_0",), {"tiny": 1}, (1, 512), Setting(1, 1), (None, roofs), True, lambda _: None)
    found = [*products.run(*given)]  # type: ignore[arg-type]
    assert [r["what"] for r in found] == ["W 512x1024, 1 rows", "W 512x1024, 512 rows"]
    assert all(r["why"].endswith("0 are allowed") for r in found)


@pytest.mark.parametrize(
    ("device", "m", "repetitions", "seconds"),
    [
        ("cpu", 1, 20, 0.001 * 25),  # by W's bytes
        ("cpu", 1000, 5, 0.02 * 10),  # by the products
        ("mps", 1, 3, 0.03 * 14),  # the least that a row takes
        ("mps", 1000, 1, 18 * 0.02 * 6),  # rows of 18 calls, twice all copies
    ],
)
def test_how_long_a_cell_takes(device: str, m: int, repetitions: int, seconds: float) -> None:
    def unused(*_: object) -> torch.Tensor:
        raise AssertionError("it is not called")

    wide = Shape("", 1000, 1000)
    bind, decoded = (lambda _: unused), unused
    one = Variant("", "", 10**6, 9, bind, decoded, device=Device(device))
    roofs = {"gflop_s": 100.0, "read_gb_s": 1.0}
    found = products.calls_of(m, [one, one], wide, roofs)
    assert found == (repetitions, pytest.approx(2 * seconds))


def test_what_is_refused(
    made: Path, tmp_path: Path, closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line, before anything is measured, and nothing is written."""
    before = sorted((f, f.stat().st_mtime_ns) for f in made.iterdir())
    assert "exists: --force replaces it" in failure(capsys, "bench", "--quick", "--output", made)
    assert "is no folder" in failure(capsys, "bench", "--output", tmp_path / "gone")
    assert "cannot write to the folder" in failure(capsys, "bench", "--output", closed)
    here = ("--output", tmp_path)
    for name in ("q9", ""):
        assert f"unknown '{name}'" in failure(capsys, "bench", "--formats", name, *here)
    assert "iq1_s is only read" in failure(capsys, "bench", "--formats", "q4_0,iq1_s", *here)
    assert "error: device: tpu: no engine" in failure(capsys, "bench", "--device", "tpu", *here)
    assert "error: --quick: before tokens" in failure(capsys, "bench", "--quick", "tokens")
    assert "unknown 'speed'; allowed: compare, matmul" in failure(capsys, "bench", "speed")
    assert list(tmp_path.iterdir()) == []
    assert before == sorted((f, f.stat().st_mtime_ns) for f in made.iterdir())


def test_a_run_that_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    invented: Record,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 1 and a line; without matplotlib the record alone. --force replaces what is there."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    bad = cell("kv", 8, 1.0, ok=False, worst=7.0)
    for extra, status in (([], 0), ([bad], 1)):
        found = invented | {"products": [*invented["products"], *extra]}
        monkeypatch.setattr(run, "measure", lambda *_, found=found: found)
        arguments = ["bench", "--force", "--output", str(tmp_path)]
        if status:
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            assert ended.value.code == status
        else:
            assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "a picture needs matplotlib: pip install matplotlib" in out
        wrong = "WRONG: metalmm q4_0, W 8×32, 8 rows: error 7 of its bound"
        assert (wrong in out) == bool(status)
        (path,) = tmp_path.iterdir()
        assert record.read(path) == found


def test_a_token_that_fails_loses_no_products(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record is written, without the message, which may have paths; the status is 1."""

    def fails(*_: object) -> Iterator[Record]:
        raise ImportError(f"cannot import a name from {tmp_path}")
        yield

    monkeypatch.setattr(stack, "run", fails)
    monkeypatch.setattr(products, "run", lambda *_: iter([cell("tiny", 1, 1.0)]))
    rates = {"read_gb_s": 1.0, "gflop_s": 1.0, "mm_gflop_s": {}, "is_native": True}
    monkeypatch.setattr(products, "measure_roofs", lambda *_: (None, rates))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--quick", "--output", str(tmp_path)])
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and str(tmp_path) in err
    assert "The products of a layer" in out and "A token" not in out  # no table without a row
    (path,) = tmp_path.glob("*.json")
    found = record.read(path)
    assert len(found["products"]) == 1 and found["tokens"] == []
    assert [s["why"] for s in found["skipped"]] == ["failed, ImportError"]
    assert str(tmp_path) not in path.read_text()


def test_other_measurements_have_their_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "usage: metalmm bench" in listed and "attention" in listed
    with pytest.raises(SystemExit) as ended:
        main(["bench", "tokens", "--models", "none"])
    assert ended.value.code == 2
    assert "bench: model 'none'; must be of tiny" in capsys.readouterr().err

"""Which row of the table of chips a machine plans as."""

from __future__ import annotations

import pytest
from plan_cases import CHIPS

from torch_metalmm import _C
from torch_metalmm.tools import explain

pytestmark = pytest.mark.quick


def test_chips() -> None:
    """Ten chips and more, of four families, each with a row of the tuning table."""
    table = _C.gpus()
    assert {gpu["name"] for gpu in table} >= set(CHIPS) and len(CHIPS) == 10
    assert {gpu["family"] for gpu in table} == {7, 8, 9, 10}
    assert {gpu["class"] for gpu in table} == {"base", "Pro", "Max", "Ultra"}
    assert all(_C.plan(n=8, k=32, format="q4_0", chip=gpu["name"])["passes"] for gpu in table)


def test_gpu_of_device() -> None:
    """A known device takes its row with its own numbers; an unknown one the nearest row."""
    gpu = _C.gpu_of_device("Apple M4 Max", 9, cores=32, max_threadgroup_memory=65536)
    assert gpu == _C.gpu("m4-max") | {"cores": 32, "max_threadgroup_memory": 65536}
    assert _C.gpu("Apple M3 Ultra")["name"] == "m3-ultra"
    later = _C.gpu_of_device("Apple M7 Ultra", 12, cores=96)
    assert (later["generation"], later["class"], later["cores"]) == (5, "Ultra", 96)
    assert _C.gpu_of_device("Apple A17 Pro GPU", 9)["class"] == "base"
    assert _C.gpu_of_device("Apple A14 GPU", 7)["generation"] == 1
    assert _C.gpu_of_device("Apple A13 GPU", 6)["generation"] == 1


@pytest.mark.parametrize(
    ("chip", "row"),
    [
        ("m6", "m5"),
        ("Apple M6 Pro", "m5-pro"),
        ("m7-max", "m5-max"),
        ("M12_ULTRA", "m5-ultra"),
        ("m4-ultra", "m3-ultra"),  # of the class, of the newest generation that is not newer
        ("a14", "m1"),
        ("a16", "m2"),
        ("Apple A18 Pro", "m4"),  # of a MacBook; not of the class Pro
        ("a25-pro", "m5"),
    ],
)
def test_a_chip_that_the_table_does_not_have(chip: str, row: str) -> None:
    """Planned for as the nearest row, and the plan says so."""
    name = chip.lower().replace(" ", "-").replace("_", "-").removeprefix("apple-")
    assert _C.gpu(chip) == _C.gpu(row) | {"name": name}
    for m in (1, 5, 512):
        problem = {"m": m, "n": 1024, "k": 4096, "format": "q4_k"}
        plan = _C.plan(**problem, chip=chip)
        assert plan == _C.plan(**problem, chip=row) and plan["chip"] == row
    assert f"{name} is not in the table of chips: planned for as {row}" in explain.explain(
        "1x1024x4096", "q4_k", chip
    )
    assert "table of chips" not in explain.explain("1x1024x4096", "q4_k", row)


def test_a_device_that_the_table_does_not_have_plans_as_its_row() -> None:
    """What the Metal engine reports as the row it plans for can be planned for."""
    for name, family in (("Apple M9 Pro", 13), ("Apple A18 Pro", 9), ("Apple Paravirtual", 7)):
        gpu = _C.gpu_of_device(name, family)
        assert gpu["row"] in {known["name"] for known in _C.gpus()}
        of_row = _C.gpu(gpu["row"])
        assert {k: gpu[k] for k in ("generation", "class", "cores")} == {
            k: of_row[k] for k in ("generation", "class", "cores")
        }


@pytest.mark.parametrize(
    "chip",
    ["", "m", "m0", "m01", "m-max", "m4-mega", "m4max", "m4-max-2", "a13", "a18-max", "h200"],
)
def test_what_is_no_chip(chip: str) -> None:
    with pytest.raises(
        ValueError, match=f"chip: unknown '{chip}'; allowed: m1, .*m5-ultra; .*m6-pro"
    ):
        _C.gpu(chip)
    with pytest.raises(ValueError, match=f"chip: unknown '{chip}'"):
        _C.plan(n=8, k=32, format="q4_0", chip=chip)

"""bench neon: the reader of qemu's log, on a text whose counts are known, and what it refuses."""

from __future__ import annotations

import pytest
from places import ROOT

from bench.shaders import neon
from bench.shaders.neon import Count

LOG = """----------------
IN: main
0x00401000:  4e083c20  mov      x0, v1.d[0]

Trace 0: 0x7f [0000000000400f00/0000000000401000/00000001/00000201] main
----------------
IN: main
0x00401004:  3dc00020  ldr      q0, [x1]

Trace 0: 0x80 [0000000000400f00/0000000000401004/00000001/00000201] main
Trace 0: 0x7f [0000000000400f00/0000000000401000/00000001/00000201] main
"""


def test_each_execution_of_an_address_counts() -> None:
    times, text = neon.executed(iter(LOG.splitlines()))
    assert times == {0x401000: 2, 0x401004: 1}
    assert text == {0x401000: "mov      x0, v1.d[0]", 0x401004: "ldr      q0, [x1]"}


@pytest.mark.parametrize(
    ("instruction", "computes"),
    [
        ("fmla     v6.4s, v0.4s, v19.s[0]", True),
        ("fcvt     s16, h2", True),
        (".byte    0x87, 0x97, 0x80, 0x4e", True),  # sdot, which the disassembler does not know
        ("ldp      q27, q28, [x15, #0x10]", False),
        ("str      q0, [sp, #0x190]", False),
        ("prfm     pldl1keep, [x1, #0x800]", False),
        ("and      x29, x29, #0xf0f0f0f0f0f0f0f", False),
        ("subs     x27, x27, #1", False),
        ("ret", False),
    ],
)
def test_what_computes_on_vectors(instruction: str, computes: bool) -> None:
    assert neon.computes_on_vectors(instruction) is computes


def test_each_product_stands_beside_the_least_of_ggml() -> None:
    own = {
        "q4_0": [Count(42, 30.06), Count(20, 10), Count(16, 9)],
        "affine4_g64": [Count(9, 8)] * 3,
    }
    peer = {"q4_0": {"vec_dot": Count(20, 12), "gemv": Count(8, 5)}}
    rows = neon.table(own, peer).rows
    assert rows[0] == ["q4_0", "42.0, 30.1, 5.25", "20.0, 10.0, 2.50", "16.0, 9.0, 2.00"] + [
        "20.0, 12.0",
        "8.0, 5.0",
    ]
    assert rows[1][-2:] == ["–", "–"]


def test_a_folder_that_is_not_ggml_is_refused() -> None:
    with pytest.raises(ValueError, match="--ggml .*: has no src/ggml-cpu/arch/arm"):
        neon.ggml(ROOT, ROOT)

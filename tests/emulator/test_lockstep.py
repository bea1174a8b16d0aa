"""The emulator itself: seeded faults are reported with the right kind, place and thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torch_metalmm.msl import build as msl_build
from torch_metalmm.testing import EmulatorFault, Function, MetalSource

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = (
    "device float* x [[buffer(0)]], device float* y [[buffer(1)]], "
    "threadgroup float* t [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]], "
    "uint g [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]], "
    "uint sg [[simdgroup_index_in_threadgroup]]"
)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def kernel(body: str, checked: bool = True) -> Function:
    """A kernel whose body begins at line 4 of faulty.metal."""
    text = f"{HEAD}kernel void faulty({ARGUMENTS}) {{\n{body}\n}}\n"
    return MetalSource(text, name="faulty.metal", checked=checked).function("faulty")


def fault(
    body: str, checked: bool = True, group: int = 64, schedule: str = "both", grid: int = 3
) -> EmulatorFault:
    x, y = torch.arange(64.0), torch.zeros(grid * 64)
    with pytest.raises(EmulatorFault) as caught:
        kernel(body, checked)(grid, group, [x, y], [256], schedule=schedule)
    error = caught.value
    assert error.kernel == "faulty"
    assert error.kind == "race" or f"faulty.metal:{error.line}: " in str(error)
    return error


def where(error: EmulatorFault) -> tuple[str, int, int, int]:
    return error.kind, error.line, error.simdgroup, error.lane


# {what is wrong: (body, kind, line, simdgroup, lane; of some only the first)}
FAULTS = {
    "sums at two lines": (
        "float a = x[i];\nif (sg == 1 && lane > 3)\n a = simd_sum(a);\nelse a = simd_sum(a);\n",
        ("divergent", 7, 1, 0),
    ),
    "a matrix that a lane does not reach": (
        "simdgroup_float8x8 m(1), d;\nif (lane != 31)\n simdgroup_multiply(d, m, m);\ny[i] = 0;",
        ("divergent", 6),
    ),
    "a barrier that a simdgroup does not reach": (
        f"if (sg == 0) {{\n{BARRIER}\n}}\ny[i] = 1;",
        ("deadlock", 5),
    ),
    "a barrier of other memory": (
        "t[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\ny[i] = t[63 - i];",
        ("race", 6),
    ),
    "memory that nobody wrote": (
        f"if (i == 0) t[0] = 1;\n{BARRIER}\nif (i == 40) y[i] = t[1];",
        ("uninitialized", 6, 1, 8),
    ),
    "a local array that nobody wrote": (
        f"threadgroup float a[64];\nif (i > 0) a[i] = x[i];\n{BARRIER}\ny[i] = a[i];",
        ("uninitialized", 7, 0, 0),
    ),
    "a wide access": ("y[i] = ((device float4*)x)[i].w;", ("out_of_bounds", 4)),
    "an access of a helper": (
        "simdgroup_float8x8 m;\nsimdgroup_load(m, x, 16);\ny[i] = m.thread_elements()[0];",
        ("out_of_bounds", 5),
    ),
    "a table of the program": (
        "constexpr float a[4] = {1, 2, 3, 4};\ny[i] = a[lane & 7];",
        ("undefined", 5, 0, 4),
    ),
    "a misaligned buffer": (
        "\ny[i] = ((device const float*)((device const char*)x + 2))[0];",
        ("misaligned", 5),
    ),
    "misaligned threadgroup memory": ("((threadgroup float4*)(t + 1))[0] = 0;", ("misaligned", 4)),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_has_its_kind_and_place(case: str) -> None:
    body, place = FAULTS[case]
    assert where(fault(body))[: len(place)] == place


@pytest.mark.parametrize("checked", [True, False])
def test_divergent_simd_sum(checked: bool) -> None:
    line = '\n#line 5 "folder/faulty.metal"\n'
    error = fault(f"if (lane < 16) {{{line}  y[i] = simd_sum(x[i]);\n}}", checked)
    assert where(error) == ("divergent", 5, 0, 0)
    assert "lane 0 waits at simd_sum, faulty.metal:5" in str(error)
    assert "lane 16 has returned" in str(error)


def test_divergent_kinds() -> None:
    error = fault("if (lane == 7)\n y[i] = simd_sum(x[i]);\nelse\n y[i] = simd_max(x[i]);")
    assert error.kind == "divergent"
    assert {error.line, error.other[1] if error.other else 0} == {5, 7}


def test_barriers_at_two_lines() -> None:
    error = fault(f"if (sg == 0) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}}\n")
    assert error.kind == "deadlock" and error.line == 5 and error.other == ("faulty.metal", 7)


@pytest.mark.parametrize("schedule", ["ascending", "descending"])
def test_missing_barrier_names_both_places(schedule: str) -> None:
    error = fault("t[i] = x[i];\ny[i] = t[63 - i];", schedule=schedule)
    lane = 0 if schedule == "ascending" else 31
    if error.kind == "race":
        assert error.line == 5 and error.other == ("faulty.metal", 4)
    else:  # the other simdgroup has not written yet
        assert where(error) == ("uninitialized", 5, int(schedule != "ascending"), lane)


def test_write_after_read_without_barrier() -> None:
    error = fault(f"t[i] = x[i];\n{BARRIER}\nfloat a = t[63 - i];\nt[i] = a;")
    assert error.kind == "race" and {error.line, error.other[1] if error.other else 0} == {6, 7}


def test_race_within_a_simdgroup() -> None:
    error = fault("t[i] = x[i];\ny[i] = t[i ^ 1];", group=32, schedule="ascending")
    assert error.kind in ("race", "uninitialized") and error.line == 5


def test_simdgroup_barrier_orders_a_simdgroup() -> None:
    body = "t[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = t[i ^ 1];"
    y = torch.zeros(64)
    kernel(body)(1, 64, [torch.arange(64.0), y], [256])
    assert torch.equal(y, torch.arange(64.0).view(32, 2).flip(1).flatten())


def test_schedules_differ_without_memory_checks() -> None:
    """An unchecked library still finds a missing barrier: poison and the order of simdgroups."""
    error = fault("t[i] = x[i];\ny[i + 64 * g] = t[63 - i];", checked=False)
    assert error.kind == "race" and "[[buffer(1)]]" in str(error)


@pytest.mark.parametrize(
    ("line", "slot"),
    [
        ("y[i] = x[i + 1];", "[[buffer(0)]]"),
        ("y[i + 129] = x[i];", "[[buffer(1)]]"),
        ("t[i + 1] = x[i];", "[[threadgroup(0)]]"),
        ("y[i] = x[int(i) - 64];", "[[buffer(0)]]"),
    ],
)
def test_out_of_bounds(line: str, slot: str) -> None:
    error = fault(f"\n{line}", schedule="ascending")
    assert error.kind == "out_of_bounds" and error.line == 5 and slot in str(error)
    assert (error.simdgroup, error.lane) == ((0, 0) if "int" in line else (1, 31))


@pytest.mark.parametrize(
    ("schedule", "slow", "quick"), [("ascending", 2, 3), ("descending", 3, 2), ("both", 2, 3)]
)
def test_the_fault_of_the_earliest_turn_is_reported(schedule: str, slow: int, quick: int) -> None:
    """Whichever worker comes to its own fault first; no place of another fault is mixed in."""
    body = (
        f"if (g == {slow}) {{\n float a = 0;\n for (uint n = 0; n < 500000; ++n) a += x[n & 63];\n"
        f" y[a < 0 ? 0 : 1 << 20] = 0;\n}}\nif (g == {quick}) {{ t[0] = i; y[i] = t[0]; }}"
    )
    with pytest.raises(EmulatorFault) as caught:
        kernel(body)(6, 64, [torch.arange(64.0), torch.zeros(384)], [256], schedule=schedule)
    error = caught.value
    assert (error.kind, error.line, error.other) == ("out_of_bounds", 7, None)
    assert error.threadgroup == (slow, 0, 0)


@pytest.mark.parametrize(
    ("loop", "checked"),
    [
        ("while (true) {}", False),
        ("while (x[0] == 0) {}", True),
        ("uint n = i;\nwhile (n < 99) n &= 63;\ny[n] = 1;", False),
    ],
)
def test_endless_loops_are_reported(loop: str, checked: bool) -> None:
    with pytest.raises(EmulatorFault, match="timeout: runs for more than 1 s") as caught:
        kernel(f"if (g == 0 && i < 40) return;\n{loop}", checked)(
            2, 64, [torch.zeros(64), torch.zeros(64)], [256], timeout=1
        )
    assert caught.value.kind == "timeout" and 4 <= caught.value.line <= 7


def test_an_endless_loop_of_barriers_is_reported() -> None:
    with pytest.raises(EmulatorFault, match="timeout"):
        kernel(f"while (x[0] == 0) {{\n{BARRIER}\n}}")(
            1, 64, [torch.zeros(64), torch.zeros(64)], [256], timeout=1
        )


@pytest.mark.parametrize(
    ("group", "memory", "message"),
    [(2048, 256, "2048 threads per threadgroup"), (64, 40000, "at most 32768")],
)
def test_wrong_launches(group: int, memory: int, message: str) -> None:
    run = kernel("y[i] = x[i];")
    with pytest.raises(EmulatorFault) as caught:
        run(1, group, [torch.zeros(64)] * 2, [memory])
    assert message in str(caught.value) and caught.value.kind == "usage"


def test_what_a_fault_says() -> None:
    thread = ((1, 2, 3), 4, 5)
    who = "[k, threadgroup (1, 2, 3), simdgroup 4, lane 5]"
    assert (
        str(EmulatorFault("race", "k", "text", *thread, "a.metal", 6)) == f"a.metal:6: text {who}"
    )
    other = EmulatorFault("race", "k", "text", *thread, "a.metal", 6, ("b.metal", 7))
    assert str(other) == f"a.metal:6: text (the other at b.metal:7) {who}"
    no_line = EmulatorFault("race", "k", "text", *thread, "library.so+0x12", 0)
    assert str(no_line) == f"library.so+0x12: text {who}"
    assert str(EmulatorFault("race", "k", "text")) == "text [k, threadgroup (0, 0, 0)]"
    assert str(EmulatorFault("usage", "k", "text")) == "text"


def test_names_are_suggested() -> None:
    with pytest.raises(KeyError, match="there are: faulty"):
        MetalSource(f"{HEAD}kernel void faulty({ARGUMENTS}) {{}}").function("fault")


def test_threads_may_write_one_value_to_one_place() -> None:
    """Simdgroups that write the same table are let pass; another value is a race."""
    body = f"t[lane] = x[lane] + TERM;\n{BARRIER}\ny[i] = t[lane];"
    y = torch.zeros(64)
    kernel(body.replace("TERM", "1"))(1, 64, [torch.arange(64.0), y], [256])
    assert torch.equal(y, torch.arange(32.0).repeat(2) + 1)
    error = fault(body.replace("TERM", "sg"), schedule="ascending")
    assert where(error) == ("race", 4, 1, 0) and error.other == ("faulty.metal", 4)


def test_threads_may_build_the_emulator_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msl_build, "CACHE", tmp_path)
    monkeypatch.setattr(msl_build, "_RUNTIME", ("buffers", "rounding"))  # soon compiled
    build = msl_build.runtime_objects.__wrapped__
    with ThreadPoolExecutor(4) as pool:
        objects, *others = [job.result() for job in [pool.submit(build) for _ in range(4)]]
    assert all(other == objects for other in others)
    folder = Path(objects[0]).parent
    assert sorted(folder.iterdir()) == sorted([*map(Path, objects), folder / "lock"])

"""The memory of a launch: what may be missing, and what a lane may not touch."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from torch_metalmm.testing import EmulatorFault, Function, MetalSource, MetalSyntaxError

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGUMENTS = (
    "device const float* x [[buffer(0)]], device float* y [[buffer(1)]], "
    "device float* z [[buffer(2)]], constant float4& c [[buffer(3)]], "
    "threadgroup float* t [[threadgroup(0)]], threadgroup float* u [[threadgroup(1)]], "
    "uint i [[thread_index_in_threadgroup]]"
)
SCHEDULES = ("ascending", "descending", "both")


def kernel(body: str, checked: bool = True, before: str = "") -> Function:
    """A kernel whose body is line 4 of memory.metal, where nothing is `before` it."""
    text = f"{HEAD}{before}kernel void k({ARGUMENTS}) {{\n{body}\n}}\n"
    return MetalSource(text, name="memory.metal", checked=checked).function("k")


def fault(run: Function, buffers: dict[int, object], memory: tuple[int, ...] = (256, 256)) -> str:
    """What every schedule reports, the same in all."""
    texts = set()
    for schedule in SCHEDULES:
        with pytest.raises(EmulatorFault) as caught:
            run(1, 32, buffers, memory, schedule=schedule)
        assert caught.value.line > 0 and caught.value.file.endswith("memory.metal")
        texts.add(f"{caught.value.kind}: {caught.value.text}")
    return " | ".join(sorted(texts))


@pytest.mark.parametrize("checked", [True, False])
def test_what_no_lane_touches_may_be_missing(checked: bool) -> None:
    """Buffers that are not bound, threadgroup memory of 0 bytes: as on a GPU."""
    y = torch.zeros(32)
    body = "y[i] = i; if (i > 99) { y[i] = x[i] + c.x; t[i] = z[i]; u[i] = t[i]; }"
    for memory in ((), (0,), (0, 128)):
        y.zero_()
        kernel(body, checked)(1, 32, {1: y}, memory)
        assert torch.equal(y, torch.arange(32.0))


TOUCHES = {
    "y[i] = x[i];": "[[buffer(0)]], which is not bound",
    "z[i + 3] = i;": "[[buffer(2)]], which is not bound",
    "y[i] = c.y;": "[[buffer(3)]], which is not bound",
    "t[i] = i; y[i] = t[i];": "[[threadgroup(0)]], which has no memory",
    "u[i + 5] = i; y[i] = u[i + 5];": "[[threadgroup(1)]], which has no memory",
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("body", TOUCHES)
def test_a_touch_of_what_is_missing_names_the_argument(body: str, checked: bool) -> None:
    text = fault(kernel(body, checked), {1: torch.zeros(64)}, ())
    assert text.startswith("out_of_bounds: out of bounds: ") and TOUCHES[body] in text


def neighbours(*sizes: int) -> list[Tensor]:
    """Buffers of so many floats that touch each other."""
    return list(torch.arange(float(sum(sizes))).split(sizes))


@pytest.mark.parametrize(
    ("body", "slot", "at"),
    [
        ("y[i] = x[i + 32];", 0, (128, 252)),
        ("y[i] = x[int(i) - 32];", 0, (-128, -4)),
        ("y[i] = z[int(i) - 32];", 2, (-128, -4)),
        ("y[i + 32] = x[i];", 1, (128, 252)),
        ("y[i] = ((device const float4*)x)[i].x;", 0, (128, 496)),
        ("y[i] = (&c)[1].x;", 3, (16, 16)),
    ],
)
def test_an_access_beyond_a_buffer_finds_no_other(
    body: str, slot: int, at: tuple[int, int]
) -> None:
    """Buffers side by side in the caller's memory, in any order: each is alone, and is named."""
    run = kernel(body)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)):
        sizes = [4 if s == 3 else 32 for s in order]
        buffers = dict(zip(order, neighbours(*sizes), strict=True))
        text = fault(run, buffers)
        assert f"of the {buffers[slot].nbytes} of [[buffer({slot})]]" in text, text
        places = {int(t.split("byte ")[1].split()[0]) for t in text.split(" | ")}
        assert min(places) >= at[0] and max(places) <= at[1], text


def test_an_access_beyond_threadgroup_memory_finds_no_other() -> None:
    buffers = dict(enumerate(neighbours(32, 32)))
    text = fault(kernel("u[i] = i; t[i] = u[i]; y[i] = t[i + 512];"), buffers)
    assert "of the 256 of [[threadgroup(0)]]" in text
    text = fault(kernel("t[i] = i; y[i] = u[int(i) - 64 - 64];"), buffers)
    assert "of the 256 of [[threadgroup(1)]]" in text


def test_private_memory_of_another_thread_is_named() -> None:
    body = "float a[4]; a[i & 3] = i; thread float* p = a; y[i] = p[1 << 14 | (i & 3)];"
    text = fault(kernel(body), {1: torch.zeros(32)})
    assert "at the private memory of thread " in text


CONST_WRITES = {
    "((device float*)x)[i] = 1;": "byte 0 of the 128 of [[buffer(0)]], which the kernel takes",
    "atomic_store_explicit((device atomic_uint*)x, 1u, memory_order_relaxed);": "[[buffer(0)]]",
    "const_cast<device float*>(x)[i] = 1;": "[[buffer(0)]], which the kernel takes as const",
}


@pytest.mark.parametrize("body", CONST_WRITES)
def test_writes_through_a_cast_of_const_are_reported(body: str) -> None:
    x = torch.arange(32.0)
    text = fault(kernel(body), {0: x, 1: torch.zeros(32)})
    assert text.startswith("read_only: read-only: writes 4 bytes at byte ")
    assert CONST_WRITES[body] in text.replace("byte 124", "byte 0")
    assert torch.equal(x, torch.arange(32.0))


def test_writes_to_constants_of_the_program_are_reported() -> None:
    body = "thread float* p = (thread float*)(i > 99 ? ulong(y) : ulong(&kTable[0])); p[i & 3] = i;"
    run = kernel(body, before="constant float kTable[4] = {1, 2, 3, 4};\n")
    assert "writes 4 bytes at a constant of the program" in fault(run, {1: torch.zeros(32)})


def test_one_memory_for_two_arguments_stays_one() -> None:
    """In place: the kernel reads by one argument what it writes by the other, also in part."""
    memory = torch.arange(96.0)
    x, y = memory[:64], memory[32:]
    kernel("y[i] = x[i] + 1; y[i] = x[i + 32] + 1;")(1, 32, {0: x, 1: y}, schedule="ascending")
    assert torch.equal(memory[32:64], torch.arange(32.0) + 2)
    assert torch.equal(memory[64:], torch.arange(64.0, 96.0))


def test_results_go_where_they_belong() -> None:
    """Bytes around a buffer stay, and a buffer keeps the alignment it has."""
    memory = torch.full((64, 9), -1.0)
    run = kernel("y[i % 8] = i % 8; z[0] = ulong(y) & 0xFF;")
    for row in memory:
        z = torch.zeros(1)
        run(1, 32, {1: row[1:], 2: z}, schedule="ascending")
        assert z.item() == row[1:].data_ptr() & 0xFF
    assert torch.equal(memory[:, 0], torch.full((64,), -1.0))
    assert torch.equal(memory[:, 1:], torch.arange(8.0).expand(64, 8))


def test_memory_that_is_reached_by_its_address_stays_in_place() -> None:
    text = f"""{HEAD}struct Table {{ device float* rows[2]; }};
kernel void k(constant Table& table [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {{
  table.rows[1][i] = table.rows[0][i] + 1;
}}"""
    a, b = torch.arange(32.0), torch.zeros(32)
    table = struct.pack("QQ", a.data_ptr(), b.data_ptr())
    run = MetalSource(text).function("k")
    run(1, 32, {0: table, 7: a, 8: b}, schedule="ascending")
    assert torch.equal(b, a + 1)
    with pytest.raises(EmulatorFault, match="out of bounds: reads"):
        run(1, 32, {0: table, 8: b}, schedule="ascending")


PRIVATE = "float a[{n}]; for (uint k = 0; k < {n}; ++k) a[k] = y[(k * i) & 31]; float s = 0;"
PRIVATE += "for (uint k = 0; k < {n}; ++k) s += a[(k * i) % {n}]; "
CALLS = (
    f"float f2(device float* y, uint i) {{ {PRIVATE.format(n=5000)} return s; }}\n"
    f"float f1(device float* y, uint i) {{ {PRIVATE.format(n=5000)} return s + f2(y, i); }}\n"
    f"float f0(device float* y, uint i) {{ {PRIVATE.format(n=5000)} return s + f1(y, i); }}\n"
)


@pytest.mark.parametrize("checked", [True, False])
def test_private_memory_that_does_not_fit_is_reported(checked: bool) -> None:
    """A large array, and calls whose arrays are large together; 40 KB do fit."""
    y = torch.ones(32)
    text = fault(kernel(PRIVATE.format(n=25600) + "y[i] = s;", checked), {1: y})
    assert "out of private memory: the arrays and calls of a thread need more than 57344" in text
    run = kernel("y[i] = f0(y, i);", checked, CALLS)
    assert "out of private memory" in fault(run, {1: y})
    kernel(PRIVATE.format(n=10000) + "y[i] = s;", checked)(1, 32, {1: y}, schedule="ascending")
    assert y[0] == 10000


def test_an_array_that_no_thread_could_have_is_refused() -> None:
    with pytest.raises(MetalSyntaxError, match=r"memory\.metal:3:13: 4\d{6} bytes of private"):
        kernel(PRIVATE.format(n=1 << 20) + "y[i] = s;")


@pytest.mark.parametrize("checked", [True, False])
def test_a_wild_access_is_reported(checked: bool) -> None:
    """A library without memory checks reports it, too: the processor refuses the access."""
    run = kernel("y[i] = *(device float*)(ulong(i) + 64);", checked)
    with pytest.raises(EmulatorFault, match="out of bounds"):
        run(1, 32, {1: torch.zeros(32)}, schedule="ascending")
    y = torch.zeros(32)
    kernel("y[i] = i;", checked)(1, 32, {1: y})
    assert y[31] == 31


def test_what_lies_behind_the_last_slot_is_named_after_it() -> None:
    text = f"""{HEAD}kernel void k(threadgroup float* t [[threadgroup(31)]],
        uint i [[thread_position_in_grid]]) {{ t[i + 1] = i; }}"""
    with pytest.raises(EmulatorFault, match=r"of the 128 of \[\[threadgroup\(31\)\]\]"):
        MetalSource(text).function("k")(1, 32, {}, {31: 128})


def test_slots_that_there_are_not() -> None:
    run = kernel("y[i] = i;")
    with pytest.raises(ValueError, match=r"\[\[buffer\(32\)\]\]: indices from 0 to 31"):
        run(1, 32, {1: torch.zeros(32), 32: torch.zeros(1)})
    with pytest.raises(ValueError, match=r"\[\[threadgroup\(-1\)\]\]: indices from 0 to 31"):
        run(1, 32, {1: torch.zeros(32)}, {-1: 16})
    text = f"{HEAD}kernel void k(device float* y [[buffer(40)]]) {{ y[0] = 1; }}"
    with pytest.raises(EmulatorFault, match=r"\[\[buffer\(40\)\]\]; indices below 32"):
        MetalSource(text).function("k")(1, 1, {})

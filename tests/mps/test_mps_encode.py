"""What the Metal engine encodes, recorded on Linux: the same as the emulator is given, what the
plan and the tensors say, and within Metal's rules."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from host_compiler import COMPILER
from places import ROOT, TESTS
from plan_cases import STRATEGIES, strategies_used, strategy_of
from shaders import NAMES, SLOTS, args_of
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.msl.build import preprocess, unmark
from torch_metalmm.msl.source import Reader

ops = torch.ops.metalmm
CHIP, CORES, N, K = "m1", 4, 37, 1024
FORMATS = ("f16", "q4_0", "q4_k", "mxfp4", "affine4_g64_f32")
SPLIT = "split_reduce"
PROBES = ("add", "sub", "mul", "div", "dot")


@dataclass(frozen=True)
class Call:
    """An op, its operands by slot, and the problem that it must plan.

    `before`: what the op plans before that, in order; `made`: operands of the last plan that the
    earlier passes make, {slot: number of the pass whose y it is}.
    """

    run: Callable[[], Tensor]
    operands: dict[str, Tensor]
    problem: dict[str, Any]
    before: tuple[Call, ...] = ()
    made: dict[str, int] = field(default_factory=dict)


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """x [m, k] that begins inside its storage, rows apart."""
    return torch.zeros(m + 1, k + 24, dtype=dtype)[1:, 8 : 8 + k]


def packed(name: str) -> Tensor:
    """Some rows of a larger table."""
    return torch.zeros(3 * N, formats.get(name).row_bytes(K), dtype=torch.uint8)[N : 2 * N]


def strides(x: Tensor, w: Tensor) -> dict[str, int]:
    return {"x_stride": x.stride(0) if len(x) > 1 else K, "w_stride": w.stride(0)}


def linear(name: str, strategy: str | None, m: int, dtype: torch.dtype) -> Call:
    x, w, bias = rows(m, K, dtype), packed(name), torch.zeros(N + 5, dtype=dtype)[5:]
    problem = {"m": m, "n": N, "k": K, "bias": True, "strategy": strategy, **strides(x, w)}
    run = lambda: ops.linear(x, w, bias, name, strategy)  # noqa: E731
    return Call(run, {"x": x, "weight": w, "bias": bias}, problem | {"format": name})


def swiglu(name: str, dtype: torch.dtype) -> Call:
    x, gate, up = rows(1, K, dtype), packed(name), packed(name)
    problem = {"op": "swiglu_up", "m": 1, "n": N, "k": K, "format": name, **strides(x, gate)}
    run = lambda: ops.swiglu(x, gate, up, name, name)  # noqa: E731
    operands = {"x": x, "weight": gate, "weight2": up}
    return Call(run, operands, problem | {"w2_stride": up.stride(0)})


def swiglu_rows(name: str, dtype: torch.dtype) -> Call:
    """SwiGLU of many rows: gate and up in f32, by the kernels of x's dtype, then silu_mul."""
    x, gate, up = rows(3, K, dtype), packed(name), packed(name)
    run = lambda: ops.swiglu(x, gate, up, name, name)  # noqa: E731
    problem = {"m": 3, "n": N, "k": K, "format": name, "y_f32": True, **strides(x, gate)}
    before = tuple(Call(run, {"x": x, "weight": w}, problem) for w in (gate, up))
    return Call(run, {}, {"op": "silu_mul", "n": 3 * N}, before, {"x": 0, "x2": 1})


def swiglu_linear(name: str, dtype: torch.dtype) -> Call:
    gate, up, w = rows(2, K, dtype), rows(2, K, dtype), packed(name)
    problem = {"op": "swiglu_down", "m": 2, "n": N, "k": K, "format": name, **strides(gate, w)}
    run = lambda: ops.swiglu_linear(gate, up, w, None, name)  # noqa: E731
    return Call(run, {"x": gate, "x2": up, "weight": w}, problem)


def gemm(name: str, dtype: torch.dtype) -> Call:
    x, w, c = rows(3, K, dtype), packed(name), torch.zeros(5, N, dtype=dtype)[2:]
    problem = {"m": 3, "n": N, "k": K, "c": True, "alpha": 0.5, "beta": 2.0, **strides(x, w)}
    run = lambda: ops.gemm(x, w, name, c, 0.5, 2.0)  # noqa: E731
    return Call(run, {"x": x, "weight": w, "c": c}, problem | {"format": name})


def embedding(name: str, dtype: torch.dtype) -> Call:
    ids, w = torch.arange(9)[3:], packed(name)
    problem = {"op": "embedding", "m": 6, "n": N, "k": K, "format": name, "w_stride": w.stride(0)}
    run = lambda: ops.embedding(ids, w, name, K, dtype=dtype)  # noqa: E731
    return Call(run, {"ids": ids, "weight": w}, problem)


def dequantize(name: str, dtype: torch.dtype) -> Call:
    w = packed(name)
    problem = {"op": "dequantize", "n": N, "k": K, "format": name, "w_stride": w.stride(0)}
    return Call(lambda: ops.dequantize(w, name, K, dtype=dtype), {"weight": w}, problem)


def probe(op: str, dtype: torch.dtype) -> Call:
    x, x2 = rows(1, K, dtype)[0], rows(1, K, dtype)[0]
    size = {"k" if op == "dot" else "n": K}
    return Call(lambda: ops.probe(x, x2, op), {"x": x, "x2": x2}, {"op": op, **size})


FORCED = [s for s in _C.strategies("linear") if s != SPLIT]
CALLS: dict[str, Callable[[str, torch.dtype], Call]] = {
    **{s: lambda f, t, s=s: linear(f, s, 3, t) for s in FORCED},
    **{f"m={m}": lambda f, t, m=m: linear(f, None, m, t) for m in (1, 2, 40, 300)},
    SPLIT: lambda f, t: linear(f, SPLIT, 2, t),
    "swiglu_up": swiglu,
    "swiglu_down": swiglu_linear,
    "silu_mul": swiglu_rows,
    "gemm op": gemm,
    "embedding": embedding,
    "dequantize": dequantize,
    **{op: lambda _, t, op=op: probe(op, t) for op in PROBES},
}


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """The list has, at the end, the encoder calls of the ops that ran inside."""
    calls: list[Any] = []
    _C.install_recorder(CHIP, CORES)
    try:
        yield calls
    finally:
        calls += _C.remove_recorder()


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library of shaders that keeps what it is launched with."""
    folder = tmp_path_factory.mktemp("spy")
    names, library = folder / "kernels.inc", folder / "spy.so"
    names.write_text("".join(f"KERNEL({k})\n" for k in _C.kernel_names()))
    options = ["-shared", "-fPIC", "-std=c++17", f"-I{ROOT / 'csrc'}"]
    options += [f"-I{ROOT}", f'-DKERNELS="{names}"']
    source = str(TESTS / "mps/spy.cpp")
    subprocess.run([*COMPILER, *options, source, "-o", str(library)], check=True)
    _C.load_emulated(str(library))
    out = ctypes.CDLL(str(library))
    out.spy_take.restype = ctypes.c_char_p
    return out


def consumed(spy: ctypes.CDLL, run: Callable[[], Tensor]) -> list[dict[str, Any]]:
    """What the emulator is given for an op: its launches."""
    spy.spy_take()
    _C.install_emulator(CHIP, False, CORES)
    try:
        run()
    finally:
        _C.remove_emulator()
    return [json.loads(line) for line in spy.spy_take().decode().splitlines()]


def passes_of(calls: list[Any]) -> list[list[Any]]:
    """Encoder calls, cut after each dispatch."""
    out: list[list[Any]] = [[]]
    for call in calls:
        out[-1].append(call)
        if call[0] == "dispatch":
            out.append([])
    assert not out.pop(), "calls after the last dispatch"
    return out


@cache
def declared(strategy: str) -> set[str]:
    """The slots in the signature of the strategy's kernels, as their source declares them."""
    kernel = next(k for k in _C.kernel_names() if strategy_of(k) == strategy)
    plain, _ = unmark(preprocess(_C.metal_source(kernel), kernel, []), kernel)
    signature = next(k for k in Reader(plain).read().kernels if k.name == kernel).arguments
    names = (index.rpartition("kSlot")[2] for role, index in signature if role == "buffer")
    return {name.lower() for name in names}


def expected_buffer(slot: str, one: dict[str, Any], call: Call) -> tuple[int, int, int] | None:
    """(storage, offset, bytes) of an operand; None where the engine allocates it."""
    t = call.operands.get(slot)
    if t is None or slot not in one["slots"]:
        return None
    elements = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    item = t.element_size()
    return t.untyped_storage().data_ptr(), t.storage_offset() * item, (elements + 1) * item


def buffers_of(calls: list[Any]) -> dict[str, list[int]]:
    """{slot: [base, offset, bytes]} of the encoder calls of a pass."""
    return {SLOTS[slot]: rest for name, slot, *rest in calls if name == "set_buffer"}


def check_pass(
    calls: list[Any], one: dict[str, Any], call: Call, y_bytes: int, made: dict[str, list[int]]
) -> None:
    """Encoder calls against the plan, the operands and the size of what the pass writes.

    made: what passes before have written, by the slot that it is bound to.
    """
    assert calls[0] == ("set_pipeline", one["kernel"], list(one["constants"].values()))
    assert calls[-3] == ("set_bytes", SLOTS.index("args"), args_of(one))
    assert calls[-2] == ("set_threadgroup_memory", 0, one["threadgroup_bytes"])
    assert calls[-1] == ("dispatch", one["grid"], one["group"])
    buffers = buffers_of(calls)
    assert len(buffers) == len(calls) - 4, "a slot is set twice, or a call is of another kind"
    assert set(buffers) | {"args"} == set(one["slots"]) == declared(strategy_of(one["kernel"]))
    for slot, buffer in buffers.items():
        expected = expected_buffer(slot, one, call)
        if expected:
            assert buffer == list(expected), slot
        elif slot in made:
            assert buffer == made[slot], slot
        elif slot not in ("y", "partial"):  # absent: memory that is there, none of it readable
            assert buffer == [*buffers["y"][:2], 0], slot
    assert buffers["y"][1:] == [0, y_bytes]


def check_rules(calls: list[Any], y: Tensor) -> None:
    """What Metal's validation layer and Apple's limits ask of a dispatch."""
    (_, index, memory), (_, grid, group) = calls[-2:]
    assert index == 0 and memory % 16 == 0 and 0 < memory <= 32768
    assert all(grid) and all(group) and group[0] * group[1] * group[2] <= 1024
    assert len(calls[-3][2]) <= 4096
    for _, slot, base, offset, _ in calls[1:-3]:
        name = SLOTS[slot]
        size = {"weight": 1, "weight2": 1, "ids": 8, "partial": 4}.get(name, y.element_size())
        assert base and offset % size == 0, name


def check_consumed(calls: list[Any], launch: dict[str, Any], call: Call) -> None:
    """Encoder calls against what the emulator took for the same pass of the same op."""
    assert calls[0][1] == launch["kernel"]
    assert calls[0][2] == [launch["constants"][str(i)] for i in range(len(calls[0][2]))]
    assert bytes.fromhex(launch["args"]) == calls[-3][2]
    assert launch["threadgroup"] == {"": 0, "0": calls[-2][2]}
    assert [launch["grid"], launch["group"]] == list(calls[-1][1:])
    assert launch["threads"] == [a * b for a, b in zip(*calls[-1][1:], strict=True)]
    taken = {int(slot): rest for slot, rest in launch["buffers"].items() if slot}
    del taken[SLOTS.index("args")]
    own = {slot: (base, offset, size) for _, slot, base, offset, size in calls[1:-3]}
    assert set(taken) == set(own)
    # What the op makes is a new tensor in each of the two runs: only its size can be compared.
    given = {t.untyped_storage().data_ptr() for t in call.operands.values()}
    for slot, (base, offset, size) in own.items():
        at = base + offset if base in given else taken[slot][0]
        assert taken[slot] == [at, size], SLOTS[slot]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", CALLS)
def test_encoding(case: str, name: str, spy: ctypes.CDLL) -> None:
    """Slots, offsets, bytes, constants, threadgroup memory and grid of every pass."""
    for dtype in NAMES:
        call = CALLS[case](name, dtype)
        with recorded() as calls:
            y = call.run()
        passes, launches = passes_of(calls), consumed(spy, call.run)
        planned = [(c, planned_for(c, dtype)) for c in (*call.before, call)]
        steps = [(c, plan, one) for c, plan in planned for one in plan["passes"]]
        assert len(passes) == len(steps) == len(launches) > 0
        assert len(passes) == 2 or case != SPLIT
        made = {slot: buffers_of(passes[i])["y"] for slot, i in call.made.items()}
        for i, (of, plan, one) in enumerate(steps):
            is_last = one is plan["passes"][-1]
            size = 4 if of.problem.get("y_f32") else y.element_size()
            y_bytes = y.numel() * size if is_last else plan["workspace_bytes"]
            check_pass(passes[i], one, of, y_bytes, made if of is call else {})
            check_rules(passes[i], y)
            check_consumed(passes[i], launches[i], of)


def planned_for(call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """The last plan of the call."""
    plan: dict[str, Any] = _C.plan(
        **{"dtype": NAMES[dtype], "chip": CHIP, "gpu": {"cores": CORES}} | call.problem,
        x_alignment=alignment(call, "x", "x2"),
        w_alignment=alignment(call, "weight", "weight2"),
    )
    return plan


def alignment(call: Call, *slots: str) -> int:
    """The largest power of two, up to 16, at which all of these operands begin."""
    begins = [t.data_ptr() | 16 for s in slots if (t := call.operands.get(s)) is not None]
    return min((at & -at for at in begins), default=16)


def test_cases_reach_every_strategy() -> None:
    used = set()
    for case, make in CALLS.items():
        call = make("q4_0", torch.float16)
        plan = _C.plan(**call.problem, dtype="f16", chip=CHIP, gpu={"cores": CORES})
        used |= set(strategies_used(plan))
        assert case not in STRATEGIES or case in used
    assert used == set(STRATEGIES)


def test_nothing_to_compute_encodes_nothing() -> None:
    """Metal refuses a grid of zero threadgroups."""
    empty, w = torch.empty(0, K), packed("q4_0")
    with recorded() as calls:
        assert ops.linear(empty, w, None, "q4_0").shape == (0, N)
        assert ops.linear(torch.ones(2, K), w[:0], None, "q4_0").shape == (2, 0)
        assert ops.swiglu(empty, w, w, "q4_0", "q4_0").shape == (0, N)
        assert ops.embedding(torch.empty(0, dtype=torch.int64), w, "q4_0").shape == (0, K)
        assert ops.dequantize(w[:0], "q4_0").shape == (0, K)
    assert calls == []


def test_operands_without_memory() -> None:
    """K = 0: x and W have no memory, and what is bound in their place is y's."""
    with recorded() as calls:
        ops.linear(torch.empty(3, 0), torch.empty(2, 0, dtype=torch.uint8), None, "f32")
    buffers = buffers_of(calls)
    assert buffers["y"][0] and buffers["y"][2] == 24
    for slot in ("x", "weight", "bias", "c"):
        assert buffers[slot] == [buffers["y"][0], 0, 0]
    assert calls[-1][0] == "dispatch"


def test_the_recorder_goes_as_it_came() -> None:
    """The recorder's ops compute nothing; afterwards the CPU's do. No second one is installed."""
    x, w = torch.ones(1, 32), torch.ones(2, 32)
    with recorded(), pytest.raises(RuntimeError, match="it is installed"):
        _C.install_recorder()
    assert ops.linear(x, w, None, "f32").tolist() == [[32.0, 32.0]]
    with pytest.raises(RuntimeError, match="not installed"):
        _C.remove_recorder()

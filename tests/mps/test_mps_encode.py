"""What the Metal engine encodes, recorded on Linux: what the plan and the tensors say, and within
Metal's rules."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from cache_cases import as_stored
from encode_calls import CALLS, CHIP, CORES, SPLIT, Call, K, N, packed
from plan_cases import STRATEGIES, stored, strategies_used, strategy_of
from recorder import buffers_of, passes_of, recorded
from shaders import NAMES, SLOTS, alignment_of, args_of
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.msl.build import preprocess
from torch_metalmm.msl.markers import unmark
from torch_metalmm.msl.source import Reader

pytestmark = pytest.mark.covering

ops = torch.ops.metalmm
FORMATS = ("f16", "q4_0", "q4_k", "mxfp4", "affine4_g64_f32")


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


def check_pass(
    calls: list[Any],
    one: dict[str, Any],
    call: Call,
    y_bytes: int,
    arranged: int,
    made: dict[str, list[int]],
) -> None:
    """Encoder calls against the plan, the operands and the size of what the pass writes.

    arranged: bytes of x in an order of its own, which the plan's first pass writes; or 0.
    made: what passes before have written and the results beside y, by the slot of each.
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
        elif slot in call.gathered:
            assert buffer[0] and buffer[2]
        elif slot in made:
            assert buffer == made[slot], slot
        elif slot == "y2" and arranged:
            assert buffer[0] and buffer[1:] == [0, arranged]
        elif slot != "y":  # absent: memory that is there, none readable
            assert buffer == [*buffers["y"][:2], 0], slot
    if "y" in buffers:
        assert buffers["y"][1:] == [0, y_bytes]
    else:
        assert arranged and one["kernel"].startswith("arrange_x")


def check_rules(calls: list[Any], y: Tensor) -> None:
    """What Metal's validation layer and Apple's limits ask of a dispatch."""
    (_, index, memory), (_, grid, group) = calls[-2:]
    assert index == 0 and memory % 16 == 0 and 0 < memory <= 32768
    assert all(grid) and all(group) and group[0] * group[1] * group[2] <= 1024
    assert len(calls[-3][2]) <= 4096
    for _, slot, base, offset, _ in calls[1:-3]:
        name = SLOTS[slot]
        is_mask = name == "c" and calls[0][1].startswith("attention")
        of_slot = {"weight": 1, "weight2": 1, "ids": 8, "partial": 4} | (
            {"c": 1} if is_mask else {}
        )
        size = of_slot.get(name, y.element_size())
        assert base and offset % size == 0, name


def result(t: Tensor) -> list[int]:
    """[base, offset, bytes] of a tensor without gaps."""
    item = t.element_size()
    return [t.untyped_storage().data_ptr(), t.storage_offset() * item, t.numel() * item]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", CALLS)
def test_encoding(case: str, name: str) -> None:
    """Slots, offsets, bytes, constants, threadgroup memory and grid of every pass."""
    for dtype in NAMES:
        call = CALLS[case](name, dtype)
        with recorded(CHIP, CORES) as calls:
            results = call.run()
        y, *others = [results] if isinstance(results, Tensor) else results
        passes = passes_of(calls)
        planned = [(c, planned_for(c, dtype)) for c in (*call.before, call)]
        steps = [(c, plan, one) for c, plan in planned for one in plan["passes"]]
        assert len(passes) == len(steps) > 0
        assert len(passes) == 2 or case != SPLIT
        made = {slot: buffers_of(passes[i])["y"] for slot, i in call.made.items()}
        made |= dict(zip(("y2", "y3"), map(result, others), strict=False))
        for i, (of, plan, one) in enumerate(steps):
            is_last = one is plan["passes"][-1]
            size = 4 if of.problem.get("y_f32") else y.element_size()
            count = of.y_values or call.y_values or y.numel()
            values = count if of is call or of.problem.get("op") != "rms_norm" else 40 * K
            y_bytes = values * size if is_last else plan["workspace_bytes"]
            arranged = plan["arranged_bytes"]
            given = made if of is call else {}
            if one is not plan["passes"][0] and not arranged:
                given = given | {"partial": buffers_of(passes[i - 1])["y"]}
            check_pass(passes[i], one, of, y_bytes, arranged, given)
            check_rules(passes[i], y)


def planned_for(call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """The last plan of the call."""
    op = str(call.problem.get("op"))
    read_as_x = ["x", "norm", *(["c"] if op == "rms_norm" else [])]
    read_as_x += [] if op.startswith("expert") else ["x2"]  # scores are read one by one
    plan: dict[str, Any] = _C.plan(
        **{"dtype": NAMES[dtype], "chip": CHIP, "gpu": {"cores": CORES}} | call.problem,
        x_alignment=alignment(call, *read_as_x),
        w_alignment=alignment(call, "weight", "weight2"),
    )
    return plan


def alignment(call: Call, *slots: str) -> int:
    """The largest power of two at which all of these operands begin."""
    given = [t for s in slots if (t := call.operands.get(s)) is not None]
    return min(map(alignment_of, given), default=16)


def test_cases_reach_every_strategy() -> None:
    used = set()
    for case, make in CALLS.items():
        call = make("q4_0", torch.float16)
        plan = _C.plan(**{"dtype": "f16"} | call.problem, chip=CHIP, gpu={"cores": CORES})
        used |= set(strategies_used(plan))
        assert case not in STRATEGIES or case in used
    assert used == set(STRATEGIES)


@pytest.mark.parametrize("m", [1, 2])
def test_a_layer_is_five_passes(m: int) -> None:
    """Norm and qkv, rope, attention, o and residual, norm with gate and up, down and residual."""
    x, g, name = torch.ones(1, m, K), torch.ones(K), "q4_0"
    wide, narrow = packed(name)[:32], torch.zeros(K, formats.get(name).row_bytes(32))
    narrow = narrow.to(torch.uint8)
    with recorded(CHIP, CORES) as calls:
        qkv = ops.norm_linear(x, g, 1e-5, 0.0, wide, None, name)
        q, *_ = ops.rope(qkv, torch.ones(1, m, 8), torch.ones(1, m, 8), 2, 1)
        a = torch.zeros(1, m, 32)
        h = ops.linear(a, narrow, None, name, residual=x)
        act = ops.swiglu(h, wide, wide, name, name, "gelu_tanh", g, 1e-5, 1.0)
        y = ops.linear(act, narrow, None, name, residual=h)
    assert q.shape == (1, 2, m, 8) and y.shape == x.shape
    assert len(passes_of(calls)) == 5


@pytest.mark.parametrize("name", stored())
def test_a_write_to_a_cache_is_one_pass(name: str) -> None:
    """With q or alone: k and v as rope returns them, and as views of a projection."""
    row = formats.get(name).row_bytes(32)
    keys, values = (as_stored(name, torch.zeros(1, 2, 6, row, dtype=torch.uint8)) for _ in range(2))
    qkv, turn, slots = torch.ones(1, 3, 192), torch.ones(1, 3, 8), torch.arange(3)
    with recorded(CHIP, CORES) as calls:
        ops.rope_append(qkv, turn, turn, 2, 2, keys, values, slots, name, name)
        k, v = qkv.view(1, 3, 6, 32).transpose(1, 2).split([4, 2], 1)
        for rows in (v.contiguous(), v):
            ops.cache_append(keys, values, k[:, 2:], rows, slots, name, name)
    passes = passes_of(calls)
    assert [one[0][1] for one in passes] == [f"rope_append_{name}_f32"] * 3


def test_nothing_to_compute_encodes_nothing() -> None:
    """Metal refuses a grid of zero threadgroups."""
    empty, w = torch.empty(0, K), packed("q4_0")
    with recorded(CHIP, CORES) as calls:
        assert ops.linear(empty, w, None, "q4_0").shape == (0, N)
        assert ops.linear(torch.ones(2, K), w[:0], None, "q4_0").shape == (2, 0)
        assert ops.swiglu(empty, w, w, "q4_0", "q4_0").shape == (0, N)
        assert ops.embedding(torch.empty(0, dtype=torch.int64), w, "q4_0").shape == (0, K)
        assert ops.dequantize(w[:0], "q4_0").shape == (0, K)
    assert calls == []


def test_operands_without_memory() -> None:
    """K = 0: x and W have no memory, and what is bound in their place is y's."""
    with recorded(CHIP, CORES) as calls:
        ops.linear(torch.empty(3, 0), torch.empty(2, 0, dtype=torch.uint8), None, "f32")
    buffers = buffers_of(calls)
    assert buffers["y"][0] and buffers["y"][2] == 24
    for slot in ("x", "weight", "bias", "c"):
        assert buffers[slot] == [buffers["y"][0], 0, 0]
    assert calls[-1][0] == "dispatch"


def test_the_recorder_goes_as_it_came() -> None:
    """The recorder's ops compute nothing; afterwards the CPU's do. No second one is installed."""
    x, w = torch.ones(1, 32), torch.ones(2, 32)
    with recorded(CHIP, CORES), pytest.raises(RuntimeError, match="it is installed"):
        _C.install_recorder()
    assert ops.linear(x, w, None, "f32").tolist() == [[32.0, 32.0]]
    with pytest.raises(RuntimeError, match="not installed"):
        _C.remove_recorder()

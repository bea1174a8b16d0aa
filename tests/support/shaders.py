"""Plans run on the lockstep emulator, with memory that ends where the operands end.

Every launch runs under both schedules, without subnormals of f32, as on Apple's GPUs. Gaps between
rows are NaN (bytes 0xFF), results NaN before they are written: what a kernel reads beyond its
operands is reported, or poisons its results.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import _C
from torch_metalmm.testing import shader_library

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SLOTS: tuple[str, ...] = _C.SLOTS
_LARGEST_PAGE = 1 << 14


def memory_of(rows: Tensor, gap: int = 0, offset: int = 0) -> Tensor:
    """One dimension with `rows`: offset elements before, gap elements between, nothing behind."""
    m, k = rows.shape
    fill = 255 if rows.dtype == torch.uint8 else torch.nan
    size = offset + max(m - 1, 0) * (k + gap) + k * (m > 0)
    memory = torch.full((size,), fill, dtype=rows.dtype)
    memory.as_strided((m, k), (k + gap, 1), offset).copy_(rows)
    return memory[offset:]


def alignment_of(memory: Tensor) -> int:
    """The largest power of two, up to a page, that divides the address."""
    address = memory.data_ptr() | _LARGEST_PAGE
    return address & -address


def args_of(one: dict[str, Any]) -> bytes:
    """The arguments of a pass as the kernel reads them."""
    return struct.pack(_C.ARGS_LAYOUT, *one["args"].values())


def launch(one: dict[str, Any], buffers: dict[str, Tensor], schedule: str = "both") -> None:
    """Runs a pass of a plan on {slot: memory}."""
    library, constants = shader_library(one["kernel"]), one["constants"].values()
    run = library.function(one["kernel"], dict(enumerate(constants)))
    args = torch.frombuffer(bytearray(args_of(one)), dtype=torch.uint8)
    bound = {SLOTS.index(s): (buffers | {"args": args})[s] for s in one["slots"]}
    run(
        one["grid"],
        one["group"],
        bound,
        [one["threadgroup_bytes"]],
        schedule=schedule,
        flush_subnormals=True,
    )


def arranged_of(plan: dict[str, Any]) -> Tensor:
    """Memory for the rows of x in the order of a kernel's lanes: NaN until they are written."""
    return torch.full((max(plan["arranged_bytes"], 1),), 0xFF, dtype=torch.uint8)


def execute(
    op: str,
    buffers: dict[str, Tensor | None],
    chip: str = "m1",
    gpu: dict[str, int] | None = None,
    **problem: Any,
) -> Tensor:
    """The y of `buffers` after the plan of `op`; a slot that is None is bound to a NaN."""
    w = buffers.get("weight")
    given = (buffers.get(s) for s in ("x", "x2", "norm", "c" if op == "rms_norm" else "x"))
    x_alignment = min((alignment_of(t) for t in given if t is not None), default=16)
    plan = _C.plan(
        op,
        chip=chip,
        dtype=NAMES[buffers["y"].dtype],
        x_alignment=x_alignment,
        w_alignment=16 if w is None else alignment_of(w),
        gpu={"cores": 1} | (gpu or {}),
        **problem,
    )
    partial = torch.full((max(plan["workspace_bytes"] // 4, 1),), torch.nan)
    absent = torch.full((1,), torch.nan)
    bound = {s: absent if t is None else t for s, t in buffers.items()}
    bound = dict.fromkeys(SLOTS, absent) | bound | {"partial": partial}
    if plan["main"]:
        bound["y2"] = arranged_of(plan)
    *splits, last = plan["passes"]
    for one in splits:
        launch(one, bound | {"y": partial})
    launch(last, bound)
    return bound["y"]


def linear(
    strategy: str | None,
    name: str,
    packed: Tensor,
    x: Tensor,
    *,
    chip: str = "m1",
    gpu: dict[str, int] | None = None,
) -> Tensor:
    """x Wᵀ by one strategy. gpu: what the chip differs in."""
    (m, k), n = x.shape, packed.shape[0]
    return execute(
        "linear",
        {
            "x": memory_of(x),
            "weight": memory_of(packed),
            "y": torch.full((m, n), torch.nan, dtype=x.dtype),
        },
        chip=chip,
        gpu=gpu,
        m=m, n=n, k=k, format=name, strategy=strategy,
    )  # fmt: skip

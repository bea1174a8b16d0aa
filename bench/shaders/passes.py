"""Every kernel with a format, and a pass that plan() makes of it: what other compilers than Apple's
are given to count (agx.py, agx_registers.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch_metalmm import _C, formats

# The problems that are planned: enough that every rule of plan() takes each side.
SHAPES = ((4096, 4096), (14336, 4096), (1024, 4096), (512, 16384), (128256, 4096), (4096, 1024))
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 512)
OPS = ("linear", "swiglu_up", "swiglu_down", "embedding", "dequantize")
DTYPES = ("f16", "bf16", "f32")

Pass = dict[str, Any]


def codecs() -> dict[str, str]:
    """{codec: a format of it}: of an affine one that with groups of 64 and f16 scales."""
    out: dict[str, str] = {}
    for name in formats.names():
        codec = re.sub(r"_g\d+.*", "", name)
        if codec == name or name == f"{codec}_g64":
            out[codec] = name
    return out


def split(kernel: str) -> tuple[str, str, str]:
    """Strategy, codec ("" where there is none) and dtype of a kernel."""
    names = {s for op in _C.ops() for s in _C.strategies(op)}
    names |= {"attention_join", "arrange_x"}  # which nobody asks for
    strategy = max((s for s in names if kernel.startswith(s + "_")), key=len)
    codec, _, dtype = kernel[len(strategy) + 1 :].rpartition("_")
    return strategy, codec, dtype


def _plans(op: str, name: str, dtype: str) -> Iterable[Pass]:
    rows = ROWS if op == "linear" else [m for m in ROWS if _C.is_fused(op, m)] or [1]
    for chip in _C.gpus():
        for n, k in SHAPES:
            for m in rows:
                plan = _C.plan(op, m=m, n=n, k=k, format=name, dtype=dtype, chip=chip["name"])
                yield from plan["passes"]


def _plans_of_caches(name: str, dtype: str) -> Iterable[Pass]:
    """4 rows of q for a head of keys, and 160; heads of 128 values. None where no shader stores."""
    if f"rope_append_{name}_{dtype}" not in _C.kernel_names():
        return
    for queries in (1, 40):
        heads = {"heads": 32, "kv_heads": 8}
        asked = {"k": 128, "n": 8192, "format": name, "dtype": dtype, "chip": "m1"}
        yield from _C.plan("attention", **asked, attention=heads | {"queries": queries})["passes"]
        rope = heads | {"rotated": 128, "positions": queries, "angle_rows": queries}
        yield from _C.plan("rope_append", m=queries, **asked, rope=rope)["passes"]


def _plans_of_experts(name: str, dtype: str) -> Iterable[Pass]:
    """8 of 128 experts, of a token and of a prompt, in the tiles with most rows."""
    asked = {"n": 768, "k": 4096, "format": name, "dtype": dtype, "chip": "m1"}
    for op, m, choices in (("linear", 8, 1), ("up", 8, 1), ("down", 1, 8), ("tiles", 6400, 1)):
        sizes = {"experts": 128, "choices": choices, "sharing": 8, "tile_rows": 64, "is_oai": True}
        tiles = op == "tiles"
        bias = {"bias": not tiles, "y_f32": tiles}
        yield from _C.plan(f"expert_{op}", m=m, **asked, **bias, experts=sizes)["passes"]


def chosen() -> dict[str, Pass]:
    """{kernel that plan() chooses for a chip of the table: the pass with most rows of x}."""
    out: dict[str, Pass] = {}
    for name in codecs().values():
        for dtype in DTYPES:
            plans = (_plans(op, name, dtype) for op in OPS)
            others = (_plans_of_caches(name, dtype), _plans_of_experts(name, dtype))
            for one in chain(*plans, *others):
                best = out.setdefault(one["kernel"], one)
                if one["constants"]["batch"] > best["constants"]["batch"]:
                    out[one["kernel"]] = one
    return out


def forced(kernel: str) -> Pass | None:
    """A pass of a kernel that is only run by name; None where it has no format."""
    strategy, codec, dtype = split(kernel)
    if not codec:
        return None
    problem = {"m": 8, "n": 4096, "k": 4096, "format": codecs()[codec], "dtype": dtype}
    plan = _C.plan(strategy=strategy, chip="m1", **problem)
    return next(one for one in plan["passes"] if one["kernel"] == kernel)


def passes() -> dict[str, Pass]:
    """{kernel with a format: a pass of it}."""
    found = chosen()
    made = {kernel: found.get(kernel) or forced(kernel) for kernel in _C.kernel_names()}
    return {kernel: one for kernel, one in made.items() if one and split(kernel)[1]}

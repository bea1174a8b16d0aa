"""How long a plan takes on a chip: a prediction. Nothing here was measured on a Mac.

    time    max(memory, issue) + launch
    memory  bytes moved once / (nominal bandwidth x REACHED): W, x, y; split-K's partial results
            written and read
    issue   that of the busiest core: ceil(threadgroups / cores) x weights of a threadgroup x cycles
            of a weight / (lanes of a core x clock)
    launch  LAUNCH_US for every pass

Cycles of a weight, from the counts of issue_cycles.json (one row of x, and several):

    vector kernels   those of one row + (rows - 1) x those of a further row
    matrix kernels   those of one row - 1 + 1 for each row of the tile, used or not: assumed, that a
                     product of 8 x 8 matrices takes 16 cycles of 32 lanes for its 512
                     multiply-adds, the rate of the vector units

dense: decoding, then torch's matmul, each max(memory, issue). Decoding reads W and writes it in the
dtype of x, at the cycles of one row - 1 a weight; torch's matmul reads that, and multiplies at
TORCH_REACHED of the rate of its units, on M5 the neural accelerators for f16 and bf16.

The counts are of gemv and gemv_batched, compiled (bench/shaders); they stand for every kernel of
their kind. Not in the model: latency, threadgroup memory, cores that wait for each other, the
parallel pipes of M3 and later, throttling. docs/chip-model.md
compares it with measurements that others published and says where it is off.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil, prod
from pathlib import Path
from typing import Any

from .. import _C, formats

# Part of nominal bandwidth: MLX's 4-bit vector kernels, 0.88 to 0.94 (MLX issue 3852).
REACHED = 0.90
# Time that a dispatch adds to a serial encoder with others: 2.0 on an M1 Max (penta2himajin/qwisp
# pull request 158), 1.3 (kryptic-sh/infr pull request 14).
LAUNCH_US = 2.0
# Part of the matrix units' rate: llama.cpp's f16 products on the neural accelerators of an M5, 608
# tokens/s of a prompt of Mistral 7B (llama.cpp pull request 16634), 14.2 GFLOP a token, of the 16.2
# TFLOP/s of ten cores. Of torch's own matmul nothing is published.
TORCH_REACHED = 0.53
DTYPE_BYTES = {name: dtype.itemsize for name, dtype in formats.DTYPES.items()}
COUNTS = Path(__file__).with_name("issue_cycles.json")


@dataclass(frozen=True)
class Chip:
    """A row of the table of chips; dataclasses.replace() makes its smaller configurations."""

    name: str
    cores: int
    bandwidth_gb_s: float
    clock_mhz: float
    lanes_per_core: int
    matmul_lanes_per_core: int  # lanes of torch's matmul of f16 and bf16

    @classmethod
    def named(cls, name: str) -> Chip:
        """The chip of _C.gpus(), in its largest configuration. ValueError: an unknown name."""
        row = _C.gpu(name)
        return cls(**{field.name: row[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Prediction:
    """Microseconds, and what the model made them from."""

    memory: float
    issue: float
    launch: float
    moved_bytes: int
    cycles: float  # to issue per weight and tile of x
    decoding: float = 0.0  # dense: before the product, whose memory and issue are the above

    @property
    def total(self) -> float:
        return self.decoding + max(self.memory, self.issue) + self.launch

    @property
    def bound(self) -> str:
        """The part that takes longest: memory, issue, launch or decoding."""
        names = ("memory", "issue", "launch", "decoding")
        return max(names, key=lambda name: float(getattr(self, name)))


@functools.cache
def counts() -> Mapping[str, Any]:
    """{"batch": rows of gemv_batched, strategy: {codec: {dtype of x: cycles per weight}}}.

    Written by `python -m bench cells --write`, from the code that clang makes of the shaders.
    """
    return dict(json.loads(COUNTS.read_text()))


def cycles_per_weight(strategy: str, codec: str, dtype: str, rows: int) -> float:
    """Issue cycles for a weight and `rows` rows of x."""
    found = counts()
    one, several = (found[s][codec][dtype] for s in ("gemv", "gemv_batched"))
    further = (several - one) / (found["batch"] - 1)
    if _C.strategy(strategy)["on_matrix_unit"]:
        return float(one - 1 + rows)
    return float(one + (rows - 1) * further)


def strategy_of(kernel: str) -> str:
    """The strategy of a kernel of `linear`."""
    strategies: list[str] = _C.strategies()
    return max((s for s in strategies if kernel.startswith(s + "_")), key=len)


def chosen(plan: Mapping[str, Any]) -> str:
    """The strategy of a plan of `linear` that has a result."""
    return "dense" if plan["dense"] else strategy_of(plan["passes"][plan["main"]]["kernel"])


def joins_in_place(plan: Mapping[str, Any]) -> bool:
    """Whether a bias, c or alpha joins the products of torch's matmul where they lie, in y."""
    return len(plan["passes"]) > plan["dense"]["panels"] and not plan["workspace_bytes"]


def _dense_cost(plan: Mapping[str, Any], chip: Chip) -> Prediction:
    product = plan["dense"]
    (m, n, k), dtype = (product[size] for size in "mnk"), product["dtype"]
    value, packed = DTYPE_BYTES[dtype], n * formats.get(product["format"]).row_bytes(k)
    bandwidth = chip.bandwidth_gb_s * 1e3 * REACHED
    lanes = chip.cores * chip.clock_mhz * TORCH_REACHED
    lanes *= chip.lanes_per_core if dtype == "f32" else chip.matmul_lanes_per_core
    w_bytes, decoding, cycles = n * k * value, 0.0, 0.0
    moved = w_bytes + m * (k + n) * value + 2 * plan["workspace_bytes"]
    if joins_in_place(plan):
        moved += 2 * m * n * value
    if product["panels"]:
        codec = plan["passes"][0]["kernel"].removeprefix("dequantize_").rpartition("_")[0]
        cycles = counts()["gemv"][codec][dtype] - 1
        issue = n * k * cycles / (chip.cores * chip.lanes_per_core * chip.clock_mhz)
        decoding = max((packed + w_bytes) / bandwidth, issue)
    return Prediction(
        memory=moved / bandwidth,
        issue=m * n * k / lanes,
        launch=LAUNCH_US * (len(plan["passes"]) + max(product["panels"], 1)),
        moved_bytes=moved + (packed + w_bytes if product["panels"] else 0),
        cycles=cycles,
        decoding=decoding,
    )


def cost(plan: Mapping[str, Any], chip: Chip) -> Prediction:
    """The prediction for a plan of `linear` that has a result."""
    if plan["dense"]:
        return _dense_cost(plan, chip)
    main = plan["passes"][plan["main"]]
    args, kernel = main["args"], main["kernel"]
    strategy = strategy_of(kernel)
    codec, dtype = kernel[len(strategy) + 1 :].rsplit("_", 1)
    geometry = _C.strategy(strategy)
    cycles = cycles_per_weight(strategy, codec, dtype, main["constants"]["batch"] or geometry["m"])
    m, n, k = args["m"], args["n"], args["k"]
    scratch = plan["arranged_bytes"] + plan["workspace_bytes"]
    moved = n * args["w_stride"] + m * (k + n) * DTYPE_BYTES[dtype] + 2 * scratch
    turns = ceil(prod(main["grid"]) / chip.cores)
    lanes = chip.lanes_per_core * chip.clock_mhz  # lanes of a core, per microsecond
    return Prediction(
        memory=moved / (chip.bandwidth_gb_s * 1e3 * REACHED),
        issue=turns * geometry["n"] * args["k_per_part"] * cycles / lanes,
        launch=LAUNCH_US * len(plan["passes"]),
        moved_bytes=moved,
        cycles=cycles,
    )


def predict(
    m: int,
    n: int,
    k: int,
    format: str,
    chip: str | Chip,
    dtype: str = "f16",
    strategy: str | None = None,
) -> Prediction:
    """The time of y[M, N] = x[M, K] W[N, K]ᵀ, W cold. ValueError: as _C.plan; M or N is 0."""
    if m < 1 or n < 1:
        raise ValueError(f"m, n: {m}, {n}; must be at least 1")
    machine = Chip.named(chip) if isinstance(chip, str) else chip
    plan = _C.plan(
        m=m, n=n, k=k, format=format, dtype=dtype, strategy=strategy,
        chip=machine.name, gpu={"cores": machine.cores},
    )  # fmt: skip
    return cost(plan, machine)

"""`python -m bench experts`: products of the experts that tokens choose.

Decoding, a token or a few: gate and up of the chosen experts, then the weighted sum of their down
projections. Bytes of the chosen W over the time stand beside what the device reads. A prompt:
beside `linear` of the same work, which is as many rows of x for an expert as choose it on the
average, by the rows of all experts; both decode every weight and multiply as many numbers. Also
beside `linear` of all rows by the W of one expert, which torch's matmul takes where it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import formats

from ..problem import Setting, of_additions, of_store, unit
from ..roofs.roof import Roof
from ..timing import interleave
from .norm import ratio

ops = torch.ops.metalmm
PATTERN_ROWS = 64  # rows that are quantized; those of W are copies of them, in random order
DRAWS = 16  # sets of ids that calls take in turn
ROUNDINGS = 12  # of an activation, the product with up, and a sum weighted by scores, in f32
Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """E experts, C chosen by a token; gate and up [n, k] each, down [k, n]."""

    experts: int
    choices: int
    n: int
    k: int

    @staticmethod
    def parse(text: str) -> Sizes:
        """ "128x8x768x2048". ValueError: anything else."""
        parts = text.split("x")
        if len(parts) != 4 or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise ValueError(f"--experts: {text!r}; must be EXPERTSxCHOSENxNxK")
        return Sizes(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.choices} of {self.experts}, {self.n}×{self.k}"


class Cell:
    """W of all experts in one format, x, scores and ids of some tokens, on the device."""

    def __init__(self, sizes: Sizes, format: str, tokens: int, setting: Setting) -> None:
        self.sizes, self.format, self.tokens, self.setting = sizes, format, tokens, setting
        make = torch.Generator().manual_seed(tokens)
        s, put = sizes, {"device": setting.device.type, "dtype": setting.dtype}
        self.up, self.up_rows = self._weight(2 * s.n, s.k, make)
        self.down, self.down_rows = self._weight(s.k, s.n, make)
        self.x = torch.randn(tokens, s.k, generator=make).to(**put)
        self.hidden = torch.randn(tokens, s.choices, s.n, generator=make).to(**put)
        scores = torch.rand(tokens, s.choices, generator=make)
        self.scores = (scores / scores.sum(1, keepdim=True)).to(**put)
        draws = [torch.rand(tokens, s.experts, generator=make) for _ in range(DRAWS)]
        self.ids = [d.topk(s.choices).indices.to(setting.device.type) for d in draws]
        self.share = -(-tokens * s.choices // s.experts)  # rows of an expert, on the average

    def _weight(
        self, n: int, k: int, make: torch.Generator
    ) -> tuple[Tensor, Callable[[int], Tensor]]:
        """W [E, n, row_bytes], and its experts in f64."""
        rows = torch.randn(PATTERN_ROWS, k, generator=make).mul_(0.02)
        pattern = ops.quantize(rows, self.format)
        picks = torch.randint(PATTERN_ROWS, (self.sizes.experts, n), generator=make)
        where = self.setting.device.type
        decoded = formats.get(self.format).dequantize(pattern, k).double()
        return pattern.to(where)[picks.to(where)], lambda expert: decoded[picks[expert]]

    def calls(self) -> dict[str, Callable[[int], Tensor]]:
        """By the names of the columns; call(i) takes the i-th ids."""
        x, ids, name = self.x, self.ids, self.format
        swiglu, linear, plain = (
            op.default for op in (ops.expert_swiglu, ops.expert_linear, ops.linear)
        )
        out: dict[str, Callable[[int], Tensor]] = {
            "swiglu": lambda i: swiglu(x, self.up, ids[i], None, name),
            "down": lambda i: linear(self.hidden, self.down, ids[i], None, name, self.scores),
        }
        if self.share > 1:
            wide, rows = self.up.flatten(0, 1), x[:1].expand(self.share, -1).contiguous()
            every = x[:1].expand(self.tokens * self.sizes.choices, -1).contiguous()
            out["experts"] = lambda i: linear(x, self.up, ids[i], None, name)
            out["same_work"] = lambda i: plain(rows, wide, None, name)
            out["one_expert"] = lambda i: plain(every, self.up[i % self.sizes.experts], None, name)
        return out

    def worst(self, calls: Mapping[str, Callable[[int], Tensor]]) -> float:
        """The largest error of the last token, in units of its bound.

        The bound lets W be rounded to the dtype of x, as tiles of f16 do.
        """
        dtype, s, u = self.setting.dtype, self.sizes, unit(torch.float32)
        half = 0.0 if dtype is torch.float32 else unit(dtype)
        ids, x, h, scores = (t[-1].cpu() for t in (self.ids[0], self.x, self.hidden, self.scores))
        ratios = []
        for c, expert in enumerate(ids.tolist()):
            w = self.up_rows(expert)
            exact, size = w @ x.double(), w.abs() @ x.double().abs()
            error = 2 * of_additions(s.k, size) + half * size
            gate, up = exact.split(s.n)
            of_gate, of_up = error.split(s.n)
            y = torch.nn.functional.silu(gate) * up
            spread = (
                1.1 * of_gate * (up.abs() + of_up) + gate.abs() * of_up + ROUNDINGS * u * y.abs()
            )
            got = calls["swiglu"](0)[-1, c].cpu().double()
            ratios.append(((got - y).abs() / of_store(y, spread, dtype)).max())
        sums = torch.zeros(s.k, dtype=torch.float64)
        sizes = torch.zeros_like(sums)
        for c, expert in enumerate(ids.tolist()):
            w, score = self.down_rows(expert), float(scores[c])
            sums += score * (w @ h[c].double())
            sizes += abs(score) * (w.abs() @ h[c].double().abs())
        spread = 2 * of_additions(s.n * s.choices, sizes) + (half + ROUNDINGS * u) * sizes
        got = calls["down"](0)[-1].cpu().double()
        ratios.append(((got - sums).abs() / of_store(sums, spread, dtype)).max())
        return float(torch.stack(ratios).max())


def measure(cell: Cell, found: Roof, repetitions: int) -> Record:
    """One record: check, and times."""
    calls, s = cell.calls(), cell.sizes
    worst = cell.worst(calls)
    record: Record = {"kind": "experts", "format": cell.format, "sizes": str(s)}
    record |= {"tokens": cell.tokens, "worst": worst, "ok": worst <= 1}
    record["dtype"] = str(cell.setting.dtype).removeprefix("torch.")
    if not record["ok"]:
        return record
    device = cell.setting.device
    timed = {name: device.timed(call, DRAWS) for name, call in calls.items()}
    t = interleave(timed | found.timed(), repetitions)
    record |= {f"{name}_us": 1e6 * t[name].median for name in calls}
    record["roof_gbs"], _ = found.reached(t)
    chosen = len(cell.ids[0].unique())
    for name, w in (("swiglu", cell.up), ("down", cell.down)):
        record[f"{name}_gbs"] = w[0].nbytes * chosen / t[name].median / 1e9
    if cell.share > 1:
        record["of_same_work"] = ratio(t["same_work"], t["experts"])
        record["of_one_expert"] = ratio(t["one_expert"], t["experts"])
    return record


def run(
    sizes: Sizes,
    names: Sequence[str],
    tokens: Sequence[int],
    setting: Setting,
    found: Roof,
    repetitions: int,
    progress: Callable[[str], None],
) -> Iterator[Record]:
    """A record for every format and number of tokens."""
    for name in names:
        for count in tokens:
            progress(f"{sizes} {name} tokens={count}")
            yield measure(Cell(sizes, name, count, setting), found, repetitions)

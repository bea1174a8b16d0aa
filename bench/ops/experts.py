"""`python -m bench experts`: products of the experts that tokens choose.

Decoding, a token or a few: gate and up of the chosen experts, then the weighted sum of their down
projections. Bytes of the chosen W over the time stand beside what the device reads. A prompt:
beside `linear` of the same work, which is as many rows of x for an expert as choose it on the
average, by the rows of all experts; both decode every weight and multiply as many numbers. Also
beside `linear` of all rows by the W of one expert, which torch's matmul takes where it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import LABELS, Setting, copied_rows, of_additions, of_store, unit, verdict, worst_of
from ..runner import Cell, Record, Run, Way, check_formats, named
from ..shapes import parse_ints

ops = torch.ops.metalmm
DRAWS = 16  # sets of ids that calls take in turn
ROUNDINGS = 12  # of an activation, the product with up, and a sum weighted by scores, in f32


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


class Data:
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
        pattern, decoded, picks = copied_rows(self.sizes.experts * n, k, self.format, make)
        picks, where = picks.view(-1, n), self.setting.device.type
        return pattern.to(where)[picks.to(where)], lambda expert: decoded[picks[expert]]

    def calls(self) -> dict[str, Callable[[int], Tensor]]:
        """By name; call(i) takes the i-th ids."""
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

    def check(self, name: str, call: Callable[[int], Tensor]) -> Record:
        """The last token of "swiglu" or "down"; the bound lets W be rounded to the dtype of x."""
        dtype, s, u = self.setting.dtype, self.sizes, unit(torch.float32)
        half = 0.0 if dtype is torch.float32 else unit(dtype)
        ids, x, h, scores = (t[-1].cpu() for t in (self.ids[0], self.x, self.hidden, self.scores))
        if name == "down":
            rows = [self.down_rows(expert) for expert in ids.tolist()]
            exact, sizes = (
                sum(f(c) * (f(w) @ f(y)) for w, c, y in zip(rows, scores, h.double(), strict=True))
                for f in (lambda v: v, torch.abs)
            )
            spread = 2 * of_additions(s.n * s.choices, sizes) + (half + ROUNDINGS * u) * sizes
        else:
            products = torch.stack([self.up_rows(e) @ x.double() for e in ids.tolist()])
            size = torch.stack([self.up_rows(e).abs() @ x.double().abs() for e in ids.tolist()])
            error = 2 * of_additions(s.k, size) + half * size
            gate, up = products.split(s.n, -1)
            of_gate, of_up = error.split(s.n, -1)
            exact = torch.nn.functional.silu(gate) * up
            spread = 1.1 * of_gate * (up.abs() + of_up) + gate.abs() * of_up
            spread += ROUNDINGS * u * exact.abs()
        return verdict(worst_of(call(0)[-1], exact, of_store(exact, spread, dtype)))

    def cell(self) -> Cell:
        calls, chosen = self.calls(), len(self.ids[0].unique())
        read = {"swiglu": float(self.up[0].nbytes * chosen)}
        read["down"] = float(self.down[0].nbytes * chosen)
        ways = []
        for name, call in calls.items():
            check = (lambda n=name, c=call: self.check(n, c)) if name in read else None
            against = {f"of_{n}": n for n in ("same_work", "one_expert") if name == "experts"}
            ways.append(Way(name, call, DRAWS, check, read.get(name, 0.0), against=against))
        about = {"format": self.format, "tokens": self.tokens, "sizes": str(self.sizes)}
        title = f"Experts, {self.sizes}, x in {LABELS[self.setting.dtype]}"
        return Cell("experts", title, about, ways, self.setting.device)


def run(run: Run) -> Iterator[Record]:
    """The records of every format and number of tokens."""
    sizes, names = Sizes.parse(run.args.experts), named(run.args.formats)
    check_formats(names, (sizes.k, sizes.n))
    tokens = parse_ints(run.args.tokens)
    yield from run.cells(Data(sizes, n, t, run.setting).cell() for n in names for t in tokens)

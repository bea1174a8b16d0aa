"""`python -m bench experts`: products of the experts that tokens choose.

Decoding, a token or a few: gate and up of the chosen experts, then the weighted sum of their down
projections. Bytes of the chosen W over the time stand beside what the device reads. A prompt:
beside `linear` of the same work, which is as many rows of x for an expert as choose it on the
average, by the rows of all experts; both decode every weight and multiply as many numbers. Also
beside `linear` of all rows by the W of one expert, which torch's matmul takes where it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..problem import LABELS, Bounded, Setting, copied_rows, gated, lost, product, unit
from ..runner import Cell, Record, Run, Way, check_formats, named
from ..shapes import parse_ints, parse_product

ops = torch.ops.metalmm
DRAWS = 16  # sets of ids that calls take in turn
ROUNDINGS = 12  # an activation, the product with up, and a sum weighted by scores, in f32
SIZES = "EXPERTSxCHOSENxNxK"


class Data:
    """W of all experts in one format, x, scores and ids of some tokens, on the device.

    sizes: E experts, C chosen by a token; gate and up [n, k] each, down [k, n].
    """

    def __init__(self, sizes: tuple[int, ...], format: str, tokens: int, setting: Setting) -> None:
        self.experts, self.choices, self.n, self.k = sizes
        self.format, self.tokens, self.setting = format, tokens, setting
        make = torch.Generator().manual_seed(tokens)
        self.up, self.up_rows = self._weight(2 * self.n, self.k, make)
        self.down, self.down_rows = self._weight(self.k, self.n, make)
        self.x = setting.put(torch.randn(tokens, self.k, generator=make))
        self.hidden = setting.put(torch.randn(tokens, self.choices, self.n, generator=make))
        scores = torch.rand(tokens, self.choices, generator=make)
        self.scores = setting.put(scores / scores.sum(1, keepdim=True))
        draws = [torch.rand(tokens, self.experts, generator=make) for _ in range(DRAWS)]
        self.ids = [setting.put(d.topk(self.choices).indices) for d in draws]
        self.share = -(-tokens * self.choices // self.experts)  # rows of an expert, on the average

    def _weight(
        self, n: int, k: int, make: torch.Generator
    ) -> tuple[Tensor, Callable[[int], Tensor]]:
        """W [E, n, row_bytes], and its experts in f64."""
        pattern, decoded, picks = copied_rows(self.experts * n, k, self.format, make)
        picks, put = picks.view(-1, n), self.setting.put
        return put(pattern)[put(picks)], lambda expert: decoded[picks[expert]]

    def calls(self) -> dict[str, Callable[[int], Tensor]]:
        """By name; call(i) takes the i-th ids."""
        x, ids, name = self.x, self.ids, self.format
        of_experts, plain = ops.expert_linear.default, ops.linear.default
        swiglu = ops.expert_swiglu.default
        out: dict[str, Callable[[int], Tensor]] = {
            "swiglu": lambda i: swiglu(x, self.up, ids[i], None, name),
            "down": lambda i: of_experts(self.hidden, self.down, ids[i], None, name, self.scores),
        }
        if self.share > 1:
            wide, few = self.up.flatten(0, 1), x[:1].expand(self.share, -1).contiguous()
            every = x[:1].expand(self.tokens * self.choices, -1).contiguous()
            out["experts"] = lambda i: of_experts(x, self.up, ids[i], None, name)
            out["same_work"] = lambda i: plain(few, wide, None, name)
            out["one_expert"] = lambda i: plain(every, self.up[i % self.experts], None, name)
        return out

    def check(self, name: str, call: Callable[[int], Tensor]) -> Record:
        """The last token of "swiglu" or "down"; the bound lets W be rounded to the dtype of x."""
        dtype = self.setting.dtype
        half, roundings = lost(dtype), ROUNDINGS * unit(torch.float32)
        given = (self.ids[0], self.x, self.hidden, self.scores)
        ids, x, hidden, scores = (t[-1].cpu() for t in given)
        if name == "down":  # one sum over all choices
            w = torch.cat([self.down_rows(expert) for expert in ids.tolist()], 1)
            weighed = (scores.double()[:, None] * hidden.double()).flatten()[None]
            y, error = product(weighed, w, half + roundings, times=2)
            wanted = Bounded(y[0], error[0])
        else:
            w = torch.cat([self.up_rows(expert) for expert in ids.tolist()])
            both = (t.view(len(ids), 2, -1) for t in product(x[None], w, half, times=2))
            y, error = both
            wanted = gated(*(Bounded(y[:, i], error[:, i]) for i in (0, 1)))
            wanted = wanted.and_roundings(ROUNDINGS)
        return wanted.stored(dtype).verdict(call(0)[-1])

    def cell(self) -> Cell:
        chosen = len(self.ids[0].unique())
        read = {"swiglu": self.up[0].nbytes * chosen, "down": self.down[0].nbytes * chosen}
        ways = []
        for name, call in self.calls().items():
            check = (lambda n=name, c=call: self.check(n, c)) if name in read else None
            against = {f"of_{n}": n for n in ("same_work", "one_expert") if name == "experts"}
            ways.append(Way(name, call, DRAWS, check, read.get(name, 0.0), against=against))
        sizes = f"{self.choices} of {self.experts}, {self.n}×{self.k}"
        about = {"format": self.format, "tokens": self.tokens, "sizes": sizes}
        title = f"Experts, {sizes}, x in {LABELS[self.setting.dtype]}"
        return Cell("experts", title, about, ways, self.setting.device)


def run(run: Run) -> Iterator[Record]:
    """The records of every format and number of tokens."""
    sizes, names = parse_product("--experts", run.args.experts, SIZES), named(run.args.formats)
    check_formats(names, sizes[2:])
    tokens = parse_ints(run.args.tokens)
    yield from run.cells(Data(sizes, n, t, run.setting).cell() for n in names for t in tokens)

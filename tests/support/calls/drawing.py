"""What random calls of the ops are made of: sizes, formats, options, and tensors that lie anyhow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from inputs import activations, random_weight
from oracle import DTYPES, FORMATS
from torch import Tensor

from torch_metalmm import formats

T = TypeVar("T")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")  # of the gate of an MLP


@dataclass(frozen=True)
class Call:
    """A call of torch.ops.metalmm: what it is given, by the names of its schema."""

    op: str
    given: dict[str, Any]

    def put(self, move: Callable[[Tensor], Tensor]) -> Call:
        """The call with every tensor moved."""
        moved = {n: move(v) if isinstance(v, Tensor) else v for n, v in self.given.items()}
        return Call(self.op, moved)

    def run(self) -> tuple[Tensor, ...]:
        y = getattr(torch.ops.metalmm, self.op)(**self.given)
        return () if y is None else y if isinstance(y, tuple) else (y,)

    def __str__(self) -> str:
        shown = {n: v for n, v in self.given.items() if v is not None}
        for n, t in self.tensors().items():
            shown[n] = f"{str(t.dtype)[6:]} {list(t.shape)} {t.stride()}"
        return f"{self.op}({', '.join(f'{n}={v}' for n, v in shown.items())})"

    def tensors(self) -> dict[str, Tensor]:
        return {n: v for n, v in self.given.items() if isinstance(v, Tensor)}


def laid_out(t: Tensor, r: random.Random) -> Tensor:
    """t in other memory, beside NaN, bytes that decode to it, or ids that there are not."""
    kind = r.choice(("plain", "plain", "permuted", "part", "ones")) if t.dim() else "plain"
    if kind == "permuted":
        order = r.sample(range(t.dim()), t.dim())
        back = sorted(range(t.dim()), key=order.__getitem__)
        return t.permute(order).contiguous().permute(back)
    if kind == "part":
        nothing = {torch.uint8: 255, torch.int64: 2**40, torch.int32: 2**30, torch.bool: True}
        before, behind = ([r.choice((0, 1, 3)) for _ in t.shape] for _ in range(2))
        sizes = [a + n + b for a, n, b in zip(before, t.shape, behind, strict=True)]
        memory = torch.full(sizes, nothing.get(t.dtype, torch.nan), dtype=t.dtype)
        view = memory[tuple(slice(a, a + n) for a, n in zip(before, t.shape, strict=True))]
        return view.copy_(t)
    if kind == "ones" and t.numel():  # any stride where a dimension has one index
        strides = [s if n > 1 else 7 for n, s in zip(t.shape, t.stride(), strict=True)]
        return t.contiguous().as_strided(t.shape, strides)
    return t


class Draw:
    """The choices of the call of that number: its dtype and its format take turns."""

    def __init__(
        self,
        op: str,
        number: int,
        names: Sequence[str] = FORMATS,
        strategies: Callable[[str], Sequence[str | None]] = lambda op: (None,),
        most: int = 1100,
        dtype: torch.dtype | None = None,
    ) -> None:
        """strategies: what may be forced for an op of plans. most: values of K, about."""
        self.r = random.Random(f"{op} {number}")
        self.dtype = dtype or DTYPES[(number + number // len(names)) % 3]
        self.name = names[number % len(names)]
        self.strategies = strategies
        self.most = most

    def of(self, *choices: T) -> T:
        return self.r.choice(choices)

    def upto(self, most: int, least: int = 1) -> int:
        return self.r.randint(least, most)

    def maybe(self, make: Callable[[], T], chance: float = 0.5) -> T | None:
        return make() if self.r.random() < chance else None

    def rows(self) -> int:
        """Rows of x: every kernel's, most often few; at times none."""
        return self.of(0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 20, 33, 40)

    def leading(self, m: int) -> tuple[int, ...]:
        """Dimensions of m rows."""
        shapes: list[tuple[int, ...]] = [(m,), (m,), (1, m), (m, 1)]
        shapes += [(m // d, d) for d in (2, 3) if m % d == 0]
        return self.of(*shapes, *([()] if m == 1 else []))

    def k(self, empty: bool = False) -> int:
        """A K of the format: whole blocks, or any number of values; where empty, at times none."""
        block = formats.get(self.name).block_values
        k = block * self.upto(max(self.most // block, 2))
        return 0 if empty and self.r.random() < 0.03 else k

    def force(self, op: str) -> str | None:
        return self.of(*self.strategies(op))

    def x(
        self, *shape: int, dtype: torch.dtype | None = None, scale: float | Tensor = 1.0
    ) -> Tensor:
        values = activations(*shape, seed=self.r.random()) * scale
        return laid_out(values.to(dtype or self.dtype), self.r)

    def any_dtype(self) -> torch.dtype:
        return self.of(self.dtype, self.dtype, *DTYPES)

    def packed(self, *shape: int, name: str | None = None) -> Tensor:
        """W [..., N, K] of the format: bytes; of a dense one at times values."""
        name, (*lead, k) = name or self.name, shape
        rows = random_weight(name, max(torch.Size(lead).numel(), 0), k, self.r.random())
        w = rows.view(*lead, rows.shape[-1])
        if name in formats.DTYPES and self.r.random() < 0.5:
            w = w.view(formats.DTYPES[name])
        return laid_out(w, self.r)

    def ids(self, *shape: int, below: int) -> Tensor:
        seed = torch.Generator().manual_seed(self.r.randrange(2**30))
        ids = torch.randint(0, max(below, 1), shape, generator=seed)
        return laid_out(ids.to(self.of(torch.int64, torch.int32)), self.r)

    def written(self, name: str) -> str:
        """The name of a format as a user may write it."""
        return self.of(name, name, name.upper())

"""`python -m bench attention`: the op on caches of several formats, beside torch's own attention.

Decoding is one query against a filled cache, a prefill several queries behind what is filled, on
caches that rotate. On a CPU ggml's flash attention joins, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.hf.caches.pages import SLOTS as PAGE

from .devices import CPU
from .peers import ggml, sdpa
from .problem import (
    LABELS,
    Bounded,
    Rounding,
    Setting,
    lost,
    of_additions,
    parse_ints,
    parse_product,
    rotated,
    unit,
)
from .runner import Cell, Record, Run, Way, check_formats
from .tables import status

ops = torch.ops.metalmm
PATTERN_ROWS = 1024  # rows that are quantized; those of a cache are copies of them, in random order
CHECKED_HEADS = 3
EXP_UNITS = 42  # roundings of a weight: torch's exp is within 20 ulp, its quotient and the sum's
# Roundings of a score to the dtype of q: q and k times roots of the scale, product, weight.
PEER_ROUNDINGS = 4
MOST_BYTES = {"cpu": 6 << 30, "mps": 6 << 30, "cuda": 32 << 30}  # caches of a cell, without copies
Caches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Heads:
    """Query heads, heads of the cache, values of a head."""

    heads: int
    kv_heads: int
    size: int

    @staticmethod
    def parse(text: str) -> Heads:
        """Heads of "32x8x128". ValueError: not three positive integers, or groups not whole."""
        found = Heads(*parse_product("--heads", text, "HEADSxKV_HEADSxSIZE"))
        if found.heads % found.kv_heads:
            raise ValueError(f"--heads {text!r}; HEADS must be a multiple of KV_HEADS")
        return found

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.size}"


@dataclass(frozen=True)
class Shape:
    """q [batch, heads, queries, size] against `slots` slots, of which the last are the queries'."""

    heads: Heads
    batch: int
    queries: int
    slots: int

    def cache_bytes(self, format: str) -> int:
        """Bytes of keys and values."""
        row = formats.get(format).row_bytes(self.heads.size)
        return 2 * self.batch * self.heads.kv_heads * self.slots * row

    @property
    def flops(self) -> float:
        """Two products for each pair of a query and a slot that it sees."""
        q = self.queries
        pairs = q * (self.slots - q) + q * (q + 1) / 2
        return 4.0 * self.batch * self.heads.heads * self.heads.size * pairs


@dataclass(frozen=True)
class Rounds:
    """The roundings beyond arithmetic in f32."""

    dtype: torch.dtype = torch.float32  # dtype of q and the result
    score: float = 0.0  # error of a score in proportion to |q| |k|, and of a weight
    value: float = 0.0  # error of v in proportion to v
    sums: torch.dtype = torch.float32  # in which weighed values are added
    q_error: Callable[[Tensor], Tensor] | None = None  # the largest |change| of q

    @staticmethod
    def to(dtype: torch.dtype, times: int) -> Rounds:
        """Where q is not f32, scores and weights `times` times and values once to its dtype."""
        return Rounds(dtype, times * lost(dtype), lost(dtype))


@dataclass(frozen=True)
class Variant:
    """call(i) with cache i gives [B, heads, S, D], or [B, S, heads, D] where `queries_first`."""

    name: str
    format: str  # the cache's format
    call: Callable[[int], Tensor]
    queries_first: bool
    rounds: Rounds
    is_ours: bool = False
    in_pages: bool = False


class Data:
    """Queries and caches of a cell."""

    def __init__(self, cell: Shape, setting: Setting) -> None:
        self.cell, self.setting = cell, setting
        self._make = torch.Generator().manual_seed(cell.slots)
        h = cell.heads
        self.q = torch.randn(cell.batch, h.heads, cell.queries, h.size, generator=self._make)
        self.patterns = [torch.randn(PATTERN_ROWS, h.size, generator=self._make) for _ in "kv"]
        shape = (cell.batch, h.kv_heads, cell.slots)
        self.picks = torch.randint(PATTERN_ROWS, shape, generator=self._make)
        self._caches: dict[str, Caches] = {}

    @cached_property
    def length(self) -> Tensor:
        return torch.tensor(self.cell.slots, device=self.setting.device.type)

    def rows(self, format: str) -> list[Tensor]:
        """The patterns of keys and values in the format, as a cache has them."""
        if (dtype := formats.DTYPES.get(format)) is not None:
            return [p.to(dtype) for p in self.patterns]
        return [ops.quantize(p, format) for p in self.patterns]

    def decoded(self, format: str) -> list[Tensor]:
        """The patterns as the format has them, in f64."""
        size, spec = self.cell.heads.size, formats.get(format)
        if format in formats.DTYPES:
            return [rows.double() for rows in self.rows(format)]
        return [spec.dequantize(rows, size).double() for rows in self.rows(format)]

    def caches(self, format: str) -> Caches:
        """Keys and values, as often as no cache of the machine holds."""
        if format not in self._caches:
            device = self.setting.device.type
            picks = self.picks.to(device)
            k, v = (rows.to(device)[picks] for rows in self.rows(format))
            copies = self.setting.copies(self.cell.cache_bytes(format))
            self._caches[format] = [*zip(rotated(k, copies), rotated(v, copies), strict=True)]
        return self._caches[format]

    # ---- variants

    def ours(self, format: str) -> Variant:
        setting, caches, forced = self.setting, self.caches(format), {}
        q, op = setting.put(self.q), ops.attention.default
        # As PackedCache gives them: a token a length of the device, a prompt filled slots.
        length = self.length if self.cell.queries == 1 else None
        if setting.strategy is not None:
            forced["strategy"] = setting.strategy

        def call(i: int) -> Tensor:
            return op(q, *caches[i], format, format, length, **forced)

        # Many queries may be torch's, over keys decoded to the dtype; matrix tiles round keys, too.
        may_be_torchs = self.cell.queries > 1 or setting.strategy == "torch"
        rounds = Rounds.to(setting.dtype, PEER_ROUNDINGS + 1 if may_be_torchs else 2)
        name = " ".join(("metalmm", *forced.values(), format))
        return Variant(name, format, call, True, rounds, True)

    def paged(self, format: str) -> Variant:
        """Ours with the slots of a cache in pages, in random order."""
        cell, rows, op = self.cell, self.ours(format), ops.attention.default
        each = -(-cell.slots // PAGE)  # pages of a sequence
        order = torch.randperm(cell.batch * each, generator=self._make)
        device = self.setting.device.type
        table = order.argsort().view(cell.batch, each).to(device)
        lengths = self.length.repeat(cell.batch)
        q, placed = self.setting.put(self.q), order.to(device)

        def pages(t: Tensor) -> Tensor:
            padded = F.pad(t, (0, 0, 0, each * PAGE - cell.slots))
            parts = padded.transpose(0, 1).unflatten(2, (each, PAGE)).flatten(1, 2)
            return parts[:, placed].flatten(1, 2)[None]

        caches = [(pages(k), pages(v)) for k, v in self.caches(format)]

        def call(i: int) -> Tensor:
            return op(q, *caches[i], format, format, lengths, pages=table)

        name = f"metalmm in pages {format}"
        return replace(rows, name=name, call=call, in_pages=True)

    def peers(
        self, dtype: torch.dtype, compile: bool, refused: dict[str, str]
    ) -> Iterator[Variant]:
        """torch's attention, cache and q in one dtype; why a way does not run is noted."""
        format, kv_heads = LABELS[dtype], self.cell.heads.kv_heads
        caches, q = self.caches(format), self.q.to(self.setting.device.type, dtype)
        for label, torchs, why in sdpa.running(q, caches, kv_heads, compile):
            name, rounds = f"{label} {format}", Rounds.to(dtype, PEER_ROUNDINGS)
            if why is None:
                call = lambda i, of=torchs: of(*caches[i])  # noqa: E731
                yield Variant(name, format, call, False, rounds)
            else:
                refused.setdefault(name, why)

    def of_ggml(self, format: str) -> Variant:
        """q f32, which ggml rounds to f16, or by blocks as it does x of a product where keys are
        packed; f16 values are added in f16."""
        run = ggml.Attention(self.q, self.caches(format), format, self.setting.threads)
        half = unit(torch.float16)
        if format == "f32":
            rounds = Rounds()
        elif format == "f16":
            rounds = Rounds(score=2 * half, value=half, sums=torch.float16)
        else:
            of_q = Rounding.blocks(formats.get(format).block_values).x_error
            rounds = Rounds(score=half, value=half, q_error=of_q)
        return Variant(f"ggml flash {format}", format, run, True, rounds)

    # ---- check

    def verdict(self, variant: Variant) -> Record:
        """The check of the values of CHECKED_HEADS heads, with the last cache."""
        cell, h = self.cell, self.cell.heads
        y = variant.call(len(self.caches(variant.format)) - 1)
        y = y.transpose(1, 2) if variant.queries_first else y
        k, v = self.decoded(variant.format)
        q = self.q.to(variant.rounds.dtype).double()
        last, steps = cell.batch * h.heads - 1, CHECKED_HEADS - 1
        found = []
        for at in {last * i // steps for i in range(CHECKED_HEADS)}:
            b, head = divmod(at, h.heads)
            picks = self.picks[b, head // (h.heads // h.kv_heads)]
            wanted = attended(q[b, head], k[picks], v[picks], variant.rounds)
            found.append(wanted.verdict(y[b, head]))
        return max(found, key=lambda one: one["worst"])

    def way(self, v: Variant) -> Way:
        """ "of_f16": the speed by that of a f16 cache; "of_rows": that of pages by that of rows."""
        size, dtype = self.cell.cache_bytes(v.format), LABELS[v.rounds.dtype]
        facts = {"format": v.format, "bytes": size, "dtype": dtype, "is_ours": v.is_ours}
        against = {"of_f16": v.name.removesuffix(v.format) + "f16"} if v.is_ours else {}
        if v.in_pages:
            against["of_rows"] = f"metalmm {v.format}"
        work = (lambda: self.verdict(v), float(size), self.cell.flops)
        others = {"is_peer": not v.is_ours, "against": against, "facts": facts}
        return Way(v.name, v.call, len(self.caches(v.format)), *work, **others)


def attended(q: Tensor, k: Tensor, v: Tensor, rounds: Rounds) -> Bounded:
    """softmax(q k / sqrt(D)) v in f64 [S, D], causal, and its bound.

    Sums have the error of of_additions. With scores off by e a weight is off by exp(e) and
    EXP_UNITS, so the numerator by N, the sum of weights by W, the quotient by
    (N + |y| W) / (sum - W).
    """
    (queries, size), slots = q.shape, len(k)
    u, root = unit(torch.float32), size**-0.5
    s, scale = q @ k.t() * root, (q.abs() @ k.abs().t()) * root
    hidden = torch.arange(slots)[None] > torch.arange(slots - queries, slots)[:, None]
    top = s.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
    e = of_additions(size, scale) + (3 * u + rounds.score) * scale + u * (top - s).abs()
    if rounds.q_error is not None:
        e += rounds.q_error(q) @ k.abs().t() * root
    w = (s - top).exp().masked_fill(hidden, 0)
    relative = torch.expm1(e + e.amax(-1, keepdim=True)) + EXP_UNITS * u + rounds.score
    # The least number of f16 is 2^-24; those of f32 and bf16 are far smaller.
    w_error = (w * relative + (2.0**-25 if rounds.score else 0.0)).masked_fill(hidden, 0)
    total, total_error = w.sum(-1, keepdim=True), w_error.sum(-1, keepdim=True)
    y, size_y = w @ v / total, w @ v.abs()
    added = of_additions(slots, size_y) * (unit(rounds.sums) / u)
    numerator = w_error @ v.abs() + added + rounds.value * size_y
    total_error = total_error + of_additions(slots, total)
    rest = total - total_error
    error = torch.where(rest > 0, (numerator + y.abs() * total_error) / rest, torch.inf)
    return Bounded(y, error).stored(rounds.dtype)


# ---- cells


def variants(
    data: Data, names: Sequence[str], args: Any, refused: dict[str, str]
) -> Iterator[Variant]:
    """Ours by the formats, and the peers; what does not run is noted in `refused`."""
    yield from map(data.ours, names)
    if args.pages:
        yield from map(data.paged, names)
    device, own = data.setting.device, data.setting.dtype
    # A CPU's q is f32; f16 and bf16 read half as much and round, as the peers of products do.
    for dtype in LABELS if device == CPU else (own,):
        yield from data.peers(dtype, args.compile and dtype is own, refused)
    if why := ggml.missing(device):
        refused.setdefault("ggml", why)
    else:
        yield from map(data.of_ggml, [name for name in names if name in ggml.TYPES])


def shapes(
    heads: Heads,
    batches: Sequence[int],
    contexts: Sequence[int],
    prefill: int,
    filled: Sequence[int],
) -> list[Shape]:
    """Decoding at each batch and context; a prefill behind each number of filled slots."""
    found = [Shape(heads, b, 1, n) for b in batches for n in contexts]
    return found + [Shape(heads, batches[0], prefill, prefill + n) for n in filled if prefill]


def run(run: Run) -> Iterator[Record]:
    """The records of every cell; what does not run is named at the end."""
    args, setting, device = run.args, run.setting, run.device.type
    heads = Heads.parse(args.heads)
    names = [formats.get(name).name for name in args.formats.split(",")]
    check_formats(names, [heads.size])
    contexts, filled = parse_ints(args.context), parse_ints(args.filled, least=0)
    wanted = shapes(heads, parse_ints(args.batch), contexts, args.prefill, filled)
    refused: dict[str, str] = {}
    dense = LABELS if device == "cpu" else (setting.dtype,)
    needed = {*names, *(LABELS[d] for d in dense)}

    def cells() -> Iterator[Cell]:
        for shape in wanted:
            what = f"batch {shape.batch}, {shape.queries} of {shape.slots}"
            size = sum(shape.cache_bytes(name) for name in needed)
            if size > MOST_BYTES[device]:
                most = MOST_BYTES[device] / 1e9
                refused[what] = f"{size / 1e9:.0f} GB of caches; at most {most:.0f}"
                continue
            status(f"attention: {what}: check")
            data = Data(shape, setting)
            queries = f"{shape.queries} queries" if shape.queries > 1 else "one query"
            about = {"batch": shape.batch, "queries": shape.queries, "slots": shape.slots}
            ways = [data.way(v) for v in variants(data, names, args, refused)]
            title = f"Attention of {heads}, {queries}"
            yield Cell("attention", title, about, ways, setting.device, may_be_slow=True)

    yield from run.cells(cells())
    yield from ({"kind": "skipped", "what": n, "why": why} for n, why in refused.items())

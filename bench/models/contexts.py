"""`python -m bench tokens --cache FORMATS`: a token after several contexts, by the cache.

Caches are filled with random rows, the same for each system, instead of a prompt; llama.cpp, which
takes no rows, evaluates one. All systems of a model are checked after each context, then they
decode in turns, and go back.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from torch_metalmm import PackedCache, formats, fuse_
from torch_metalmm.hf.caches import pair_of

from ..devices import Device
from ..peers import llama_cpp_model
from ..timing import PAUSE_SECONDS, Timing
from . import llamas, shares
from .filled import CHUNK, Constant, Evaluated, Filled, Growing, RoundedCache
from .tokens import BEYOND, CHECKED_TOKENS, EXACT_FACTOR, ROUNDED_LIMIT, Reference

Progress = Callable[[str], None]
Record = dict[str, Any]


@dataclass
class Entry:
    """A system, the model that holds its weights, and the system that its ratio refers to."""

    system: Filled
    weights: nn.Module
    plain: str | None = None
    error: float | None = None  # found before, of a cache that takes no rows
    steps: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def round(self, token: int, count: int) -> None:
        """Greedy steps, and back."""
        time.sleep(PAUSE_SECONDS)
        self.system.begin()
        for _ in range(count):
            start, busy = time.perf_counter(), time.thread_time()
            logits = self.system.feed([token])
            self.hosts.append(time.thread_time() - busy)
            token = int(logits.argmax())
            self.steps.append(time.perf_counter() - start)
        self.system.rewind(count)
        self.rounds.append(median(self.steps[-count:]))

    def clear(self) -> None:
        self.steps, self.hosts, self.rounds = [], [], []


@dataclass
class Builder:
    """Makes the systems of one model."""

    source: llamas.Source
    args: Any
    device: Device
    dtype: torch.dtype
    folder: Path
    progress: Progress
    skipped: list[Record] = field(default_factory=list)

    @property
    def beyond(self) -> int:
        return int(self.args.new_tokens) + BEYOND

    def entries(self) -> Iterator[Entry]:
        dtype = torch.float16 if self.device.type != "cpu" else torch.float32
        dense, exact = self.source.dense(dtype), self.dtype is torch.float32
        short = str(dtype).replace("torch.float", "f")
        name = f"transformers {short}, DynamicCache"
        yield Entry(Growing(name, dense, exact, DynamicCache, "sdpa"), dense)
        for name in self.args.formats.split(","):
            self.progress(f"{self.source.name}: packing {name}")
            packed = self.source.packed(formats.get(name).name)
            model, label = packed, f"metalmm {name}"
            if not self.args.no_fuse:
                model, label = fuse_(copy.deepcopy(packed)), f"{label}, fuse_"
            plain = f"{label}, DynamicCache"
            yield Entry(Growing(plain, model, exact, DynamicCache, "sdpa"), packed)
            for cache in self.args.cache:
                yield Entry(self.growing(label, model, cache), packed, plain)
            if self.device.type == "cuda" and not self.args.no_graph:
                yield from self.graphs(label, model, packed)
            if not self.args.no_peers:
                yield from self.peers(name, packed)

    def growing(self, label: str, model: Any, cache: str) -> Growing:
        """The model with a PackedCache of that format."""
        keeps = formats.DTYPES.get(cache) in (self.dtype, torch.float32)
        exact = self.dtype is torch.float32 and keeps
        name = f"{label}, PackedCache {cache}"
        make = partial(PackedCache, model.config, cache)
        return Growing(name, model, exact, make, "metalmm", cache)

    def graphs(self, label: str, model: Any, packed: nn.Module) -> Iterator[Entry]:
        """Captured steps: StaticCache, and a PackedCache of each format."""
        plain = f"{label}, StaticCache, graph"
        yield Entry(Constant(plain, model, static_cache(model), "sdpa", self.beyond), packed)
        for cache in self.args.cache:
            name = f"{label}, PackedCache {cache}, graph"
            make = packed_cache(model, cache)
            system = Constant(name, model, make, "metalmm", self.beyond, cache)
            yield Entry(system, packed, plain)

    def peers(self, name: str, packed: Any) -> Iterator[Entry]:
        """llama.cpp with its flash attention, keys and values in f16 and in the formats named."""
        why = llama_cpp_model.missing(name, self.device.type)
        if why is not None:
            self.skipped.append({"kind": "skipped", "what": f"llama.cpp {name}", "why": why})
            return
        tokens = [i % self.source.vocabulary for i in range(CHECKED_TOKENS)]
        reference = Reference(self.source, tokens)
        room = max(self.args.contexts) + self.beyond
        for cache in dict.fromkeys(("f16", *self.args.cache)):
            if not llama_cpp_model.CACHES.keys() >= set(pair_of(cache)):
                continue
            where = (self.folder, self.args.threads, room, CHUNK, cache)
            system = llama_cpp_model.load(packed, name, *where)
            yield Entry(Evaluated(system), packed, None, reference.error(system, packed))


def static_cache(model: Any) -> Callable[[int], Any]:
    return lambda slots: StaticCache(config=model.config, max_cache_len=slots)


def packed_cache(model: Any, format: str) -> Callable[[int], Any]:
    return lambda slots: PackedCache(model.config, format, slots=slots)


class Wanted:
    """The logits after a context and a token, keys and values rounded as the system's cache does:
    in float64 with the weights of each system in turn; of a large model, of the system itself with
    a DynamicCache."""

    def __init__(self, source: llamas.Source) -> None:
        self.model = None if source.is_large else source.dense(torch.float64).cpu()
        self._found: dict[tuple[int, str | None, int], Tensor] = {}

    def error(self, entry: Entry, context: int) -> float:
        """|logits - wanted| / |wanted|."""
        system = entry.system
        if not isinstance(system, Growing):
            assert entry.error is not None
            return entry.error
        key = id(entry.weights), system.format, context
        if key not in self._found:
            self._found[key] = self._of(system, entry.weights, context)
        wanted = self._found[key]
        system.begin()
        given = system.feed([1]).cpu().double()
        system.rewind(1)
        return float((given - wanted).norm() / wanted.norm())

    def _of(self, system: Growing, weights: nn.Module, context: int) -> Tensor:
        model = self.model
        if model is None:
            model = system.model
        else:
            model.load_state_dict(llamas.dense_state(weights), strict=False)
        make = partial(RoundedCache, system.format) if system.format else DynamicCache
        reference = Growing("", model, True, make, "sdpa")
        reference.extend(context)
        return reference.feed([1]).cpu().double()


def after(
    entries: Sequence[Entry], context: int, builder: Builder, wanted: Wanted, pick: random.Random
) -> Iterator[Record]:
    """A record per system, all of which hold `context` tokens."""
    args, progress, source = builder.args, builder.progress, builder.source
    exact_error, errors = 0.0, {}
    for entry in entries:
        progress(f"{source.name}, {context}: {entry.system.name}: fill, check")
        entry.system.extend(context)
        errors[entry.system.name] = wanted.error(entry, context)
        exact_error = exact_error or errors[entry.system.name]
        entry.round(1, 2)
        entry.clear()
    for i in range(args.repetitions):
        progress(f"{source.name}, {context}: round {i + 1} of {args.repetitions}")
        for entry in pick.sample(entries, len(entries)):
            entry.round(1, args.new_tokens)
    rounds = {e.system.name: e.rounds for e in entries}
    for entry in entries:
        system = entry.system
        limit = EXACT_FACTOR * exact_error if system.exact else ROUNDED_LIMIT
        error = errors[system.name]
        record: Record = {"kind": "context", "model": source.title, "system": system.name}
        record |= {"device": builder.device.type, "context": context, "error": error}
        record |= {"ok": error <= limit, "host_ms": 1e3 * median(entry.hosts)}
        t = Timing.of(entry.steps)
        record |= {"ms": 1e3 * t.median, "ms_q1": 1e3 * t.q1, "ms_q3": 1e3 * t.q3}
        if entry.plain is not None:  # round by round, so that the load is that of both
            pairs = zip(rounds[entry.plain], entry.rounds, strict=True)
            t = Timing.of([plain / own for plain, own in pairs])
            record["gain"] = [t.q1, t.median, t.q3]
        if isinstance(system, Growing) and context == max(args.contexts):
            progress(f"{source.name}: {system.name}: shares")
            system.begin()
            record |= shares.of_system(system, 1, builder.device, args.chip).record()
        yield record


def of_model(builder: Builder) -> Iterator[Record]:
    """The records of every system and context, contexts in ascending order."""
    contexts = sorted(builder.args.contexts)
    entries, pick = [*builder.entries()], random.Random(1)
    yield from builder.skipped
    wanted = Wanted(builder.source)
    for context in contexts:
        yield from after(entries, context, builder, wanted, pick)


def run(args: Any, device: Device, dtype: torch.dtype, progress: Progress) -> Iterator[Record]:
    """The records of every model named. ValueError: a form that is not measured here."""
    if args.compile:
        raise ValueError("--compile: not with --cache")
    for source in llamas.sources(args.models, device.type, dtype):
        if isinstance(source, dict):
            yield source
            continue
        with tempfile.TemporaryDirectory() as folder:
            builder = Builder(source, args, device, dtype, Path(folder), progress)
            yield from of_model(builder)
        if device.type == "cuda":
            torch.cuda.empty_cache()

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
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from torch_metalmm import PackedCache, formats, fuse_
from torch_metalmm.hf.caches import pair_of

from ..peers import llama_cpp_model
from ..runner import Record, Run
from ..tables import status
from ..timing import PAUSE_SECONDS
from . import llamas, shares
from .filled import CHUNK, Constant, Evaluated, Growing, RoundedCache
from .tokens import (
    BEYOND,
    CHECKED_TOKENS,
    EXACT_FACTOR,
    ROUNDED_LIMIT,
    Builder,
    Entry,
    Race,
    Reference,
    distance,
)


@dataclass
class ContextBuilder(Builder):
    """Makes the systems of one model."""

    # {a system that takes no rows: its error}
    errors: dict[str, float] = field(default_factory=dict)

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
            status(f"{self.source.name}: packing {name}")
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
            self.errors[system.name] = reference.error(system, packed)
            yield Entry(Evaluated(system), packed)


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

    def error(self, system: Growing, weights: nn.Module, context: int) -> float:
        """|logits - wanted| / |wanted|."""
        key = id(weights), system.format, context
        if key not in self._found:
            self._found[key] = self._of(system, weights, context)
        system.begin()
        given = system.feed([1]).cpu().double()
        system.rewind(1)
        return distance(given, self._found[key])

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


class ContextRace(Race):
    """Times of one system after a context."""

    def turn(self, count: int) -> None:
        """Greedy steps, and back."""
        time.sleep(PAUSE_SECONDS)
        self.system.begin()
        self.decode(1, count)
        self.system.rewind(count)


def after(
    entries: Sequence[Entry],
    context: int,
    builder: ContextBuilder,
    wanted: Wanted,
    pick: random.Random,
) -> Iterator[Record]:
    """A record per system, all of which hold `context` tokens."""
    args, source = builder.args, builder.source
    exact_error, races = 0.0, dict[str, ContextRace]()
    for entry in entries:
        system: Any = entry.system
        status(f"{source.name}, {context}: {system.name}: fill, check")
        system.extend(context)
        error = builder.errors.get(system.name)
        if error is None:
            error = wanted.error(system, entry.weights, context)
        exact_error = exact_error or error
        limit = EXACT_FACTOR * exact_error if system.exact else ROUNDED_LIMIT
        fields: Record = {"kind": "context", "model": source.title, "system": system.name}
        fields |= {"device": builder.device.type, "context": context}
        fields |= {"error": error, "ok": error <= limit}
        race = races[system.name] = ContextRace(system, fields, races.get(entry.plain or ""))
        race.turn(2)
        race.clear()
    for i in range(args.repetitions):
        status(f"{source.name}, {context}: round {i + 1} of {args.repetitions}")
        for race in pick.sample([*races.values()], len(races)):
            race.turn(args.new_tokens)
    for race in races.values():
        record = race.record(0)
        if isinstance(race.system, Growing) and context == max(args.contexts):
            status(f"{source.name}: {race.system.name}: shares")
            race.system.begin()
            record |= shares.of_system(race.system, 1, builder.device, args.chip).record()
        yield record


def of_model(builder: ContextBuilder) -> Iterator[Record]:
    """The records of every system and context, contexts in ascending order."""
    entries, pick = [*builder.entries()], random.Random(1)
    yield from builder.skipped
    wanted = Wanted(builder.source)
    for context in sorted(builder.args.contexts):
        yield from after(entries, context, builder, wanted, pick)


def run(run: Run) -> Iterator[Record]:
    """The records of every model named. ValueError: a form that is not measured here."""
    args, device, dtype = run.args, run.device, run.device.dtype
    if args.compile:
        raise ValueError("--compile: not with --cache")
    for source in llamas.sources(args.models, device.type, dtype):
        if isinstance(source, dict):
            yield source
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield from of_model(ContextBuilder(source, args, device, dtype, Path(folder)))
        if device.type == "cuda":
            torch.cuda.empty_cache()

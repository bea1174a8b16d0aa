"""`python -m bench tokens --cache FORMATS`: a token after several contexts, by the cache.

Caches are filled with random rows, the same for each system, instead of a prompt; llama.cpp, which
takes no rows, evaluates one. All systems of a model are checked after each context, then they
decode in turns, and go back.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from torch_metalmm import PackedCache, formats, fuse_
from torch_metalmm.hf.caches import pair_of

from ..peers import ggml
from ..peers.programs import CHUNK, LlamaCpp
from ..runner import Record, Run
from ..shapes import parse_ints
from ..tables import status
from ..timing import PAUSE_SECONDS
from . import cache_cost, shares
from .systems import Graph, Transformers, rounded_cache
from .tokens import (
    BEYOND,
    CHECKED_TOKENS,
    Builder,
    Entry,
    Race,
    Reference,
    dense_name,
    distance,
    raced,
    records,
)


class ContextBuilder(Builder):
    """Makes the systems of one model."""

    @property
    def beyond(self) -> int:
        return self.args.new_tokens + BEYOND

    def entries(self) -> Iterator[Entry]:
        dtype = torch.float16 if self.device.type != "cpu" else torch.float32
        dense, exact = self.source.dense(dtype), self.dtype is torch.float32
        plain = {"make": DynamicCache, "attention": "sdpa"}
        name = f"{dense_name(dtype)}, DynamicCache"
        yield Entry(Transformers(name, dense, exact, **plain), dense)
        for name in self.args.formats.split(","):
            status(f"{self.source.name}: packing {name}")
            packed = self.source.packed(formats.get(name).name)
            model, label = packed, f"metalmm {name}"
            if not self.args.no_fuse:
                model, label = fuse_(copy.deepcopy(packed)), f"{label}, fuse_"
            first = f"{label}, DynamicCache"
            yield Entry(Transformers(first, model, exact, **plain), packed)
            for cache in self.args.cache:
                yield Entry(self.growing(label, model, cache), packed, first)
            if self.device.type == "cuda" and not self.args.no_graph:
                yield from self.captured(label, model, packed)
            if not self.args.no_peers:
                yield from self.llama_cpp(name, packed)

    def growing(self, label: str, model: Any, cache: str) -> Transformers:
        """The model with a PackedCache of that format."""
        keeps = formats.DTYPES.get(cache) in (self.dtype, torch.float32)
        given = {"make": partial(PackedCache, model.config, cache), "format": cache}
        exact = self.dtype is torch.float32 and keeps
        name = f"{label}, PackedCache {cache}"
        return Transformers(name, model, exact, attention="metalmm", **given)

    def captured(self, label: str, model: Any, packed: nn.Module) -> Iterator[Entry]:
        """Steps as graphs: StaticCache, and a PackedCache of each format."""
        given, first = (model, False, self.beyond), f"{label}, StaticCache, graph"
        yield Entry(Graph(first, *given, attention="sdpa"), packed)
        for cache in self.args.cache:
            name, make = f"{label}, PackedCache {cache}, graph", packed_cache(model, cache)
            system = Graph(name, *given, make, attention="metalmm", format=cache)
            yield Entry(system, packed, first)

    def llama_cpp(self, name: str, packed: Any) -> Iterator[Entry]:
        """With its flash attention, keys and values in f16 and in the formats named."""
        if why := LlamaCpp.missing(name, self.device.type):
            return self.skip(f"llama.cpp {name}", why)
        room = max(self.args.contexts) + self.beyond
        for cache in dict.fromkeys(("f16", *self.args.cache)):
            if ggml.TYPES.keys() >= set(pair_of(cache)):
                where = (self.folder, self.args.threads, room, CHUNK, cache)
                yield Entry(LlamaCpp(packed, name, *where), packed)


def packed_cache(model: Any, format: str) -> Callable[[int], Any]:
    return lambda slots: PackedCache(model.config, format, slots=slots)


def error_after(reference: Reference, entry: Entry, context: int) -> float:
    """The error of a token after `context` random rows, which the system then holds; wanted are
    rows rounded as its cache does, of a large model in the system itself with a DynamicCache."""
    system, weights, _ = entry

    def make() -> Tensor:
        cache = partial(rounded_cache, system.format) if system.format else DynamicCache
        model = reference.exact(weights) or system.model
        exact = Transformers("", model, make=cache, attention="sdpa")
        exact.extend(context)
        return exact.feed([1]).cpu().double()

    system.extend(context)
    wanted = reference.wanted((weights, system.format, context), make)
    system.begin()
    given = system.feed([1]).cpu().double()
    system.rewind(1)
    return distance(given, wanted)


def of_model(builder: ContextBuilder) -> Iterator[Record]:
    """The records of every system and context, contexts in ascending order."""
    args, entries, pick = builder.args, [*builder.entries()], random.Random(1)
    reference = Reference(builder.source)
    tokens = [i % builder.source.vocabulary for i in range(CHECKED_TOKENS)]
    # Programs that take no rows are checked after a prompt.
    others = {
        e.system.name: reference.error(tokens, e.system, e.weights)
        for e in entries
        if not isinstance(e.system, Transformers)
    }

    def turn(race: Race, count: int) -> None:
        """Greedy steps, and back."""
        time.sleep(PAUSE_SECONDS)
        race.system.begin()
        race.decode(1, count)
        race.system.rewind(count)

    for context in sorted(args.contexts):

        def error_of(entry: Entry, context: int = context) -> float:
            if entry.system.name not in others:
                return error_after(reference, entry, context)
            entry.system.extend(context)
            return others[entry.system.name]

        fields = {"kind": "context", "context": context}
        for race in raced(builder, entries, fields, error_of, turn, pick):
            record, system = race.record(), race.system
            if isinstance(system, Transformers) and context == max(args.contexts):
                status(f"{builder.source.name}: {system.name}: shares")
                system.begin()
                record |= shares.of_system(system, 1, builder.device, args.chip).record()
            yield record
    yield from builder.skipped


def run(run: Run) -> Iterator[Record]:
    """The records of every model named."""
    args = run.args
    args.cache, args.contexts = cache_cost.named(args.cache), parse_ints(args.context)
    yield from records(run, ContextBuilder, of_model)

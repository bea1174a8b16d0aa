"""The time of a token in whole models, decoded greedily at batch 1 after a prefill.

Decoding is a loop of model(...) calls with a key-value cache, without the work generate() adds.
Each system is checked, all are timed in turns, and then it is found where its time goes.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_metalmm import activations_, formats, fuse_
from torch_metalmm.hf.caches.layers import DTYPE_NAMES

from ..devices import Device
from ..peers.programs import PROGRAMS
from ..problem import parse_ints
from ..runner import Record, Run
from ..tables import status
from ..timing import PAUSE_SECONDS, Timing
from . import llamas, shares
from .quality import caches_named
from .systems import Graph, Packed, System, Transformers

CHECKED_TOKENS = 32
BEYOND = 16  # tokens that a cache of constant size has room for beyond those of a round
# Errors of the logits against float64: as a multiple of transformers' own f32 error.
EXACT_FACTOR = 10.0


def last_logits(system: System, tokens: Sequence[int]) -> Tensor:
    """The logits after the tokens, float64 on the CPU; the last token is a step of decoding."""
    system.reset()
    system.feed(tokens[:-1])
    return system.feed(tokens[-1:]).cpu().double()


def distance(given: Tensor, wanted: Tensor) -> float:
    """|given - wanted| / |wanted|."""
    return float((given - wanted).norm() / wanted.norm())


class Reference:
    """The logits that systems are compared with: of a small model in float64, with the weights of
    each system in turn; of a large one those of a system that has the weights."""

    def __init__(self, source: llamas.Source) -> None:
        self.model = None if source.is_large else source.dense(torch.float64).cpu()
        if self.model is not None and source.experts:
            self.model.config._experts_implementation = "eager"  # the others take no float64
        self._made: dict[object, Tensor] = {}

    def exact(self, weights: nn.Module) -> Any:
        """The model in float64 with these weights; None of a large one."""
        if self.model is not None:
            self.model.load_state_dict(llamas.dense_state(weights), strict=False)
        return self.model

    def wanted(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """The logits that make() gave at the first call with this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def error(self, tokens: Sequence[int], system: System, weights: nn.Module) -> float:
        """|logits - wanted| / |wanted| after these tokens, the last by a step of decoding."""
        given = last_logits(system, tokens)

        def make() -> Tensor:
            model = self.exact(weights)
            return given if model is None else Transformers("f64", model).feed(tokens).double()

        return distance(given, self.wanted(weights, make))


class Entry(NamedTuple):
    """A system, a model that holds its weights, and the system that its gain refers to."""

    system: Any
    weights: nn.Module
    plain: str | None = None


@dataclass
class Builder:
    """Makes the systems of one model, each when it is asked for."""

    source: llamas.Source
    args: Any
    device: Device
    dtype: torch.dtype
    folder: Path
    skipped: list[Record] = field(default_factory=list)

    def skip(self, what: str, why: str, **others: Any) -> None:
        self.skipped.append({"kind": "skipped", "what": what, "why": why} | others)

    def entries(self) -> Iterator[Entry]:
        yield from self.and_graphs([*self.dense()])
        for name in self.args.formats.split(","):
            status(f"{self.source.name}: packing {name}")
            packed = [*self.packed(formats.get(name).name)]
            yield from self.and_graphs(packed)
            yield from self.peers(name, packed[0].weights)

    def dense(self) -> Iterator[Entry]:
        dtypes = [torch.float16] if self.device.type != "cpu" else [torch.float32, torch.bfloat16]
        if self.source.experts:  # whose grouped_mm is of bf16
            dtypes = [torch.bfloat16] if self.source.is_large else [torch.float32]
        for dtype in dtypes:
            model, exact = self.source.dense(dtype), dtype is torch.float32
            for experts in self.source.experts or (None,):
                name = dense_name(dtype) + (f", {experts}" if experts else "")
                yield Entry(Transformers(name, model, exact, experts=experts), model)

    def packed(self, name: str) -> Iterator[Entry]:
        exact = self.dtype is torch.float32
        model, plain = self.source.packed(name), f"metalmm {name}"
        yield Entry(Transformers(plain, model, exact), model)
        if self.args.no_fuse:
            return
        fused = fuse_(llamas.sharing(model))
        yield Entry(Transformers(f"{plain}, fuse_", fused, exact), model, plain)
        dtype_name = DTYPE_NAMES[self.dtype]
        for kind in self.args.activations:
            rounded, title = activations_(llamas.sharing(fused), kind), f"{plain}, fuse_, {kind} x"
            yield Entry(Transformers(title, rounded, False), model, f"{plain}, fuse_")
            stepped = activations_(fuse_(llamas.sharing(model), cache=dtype_name), kind)
            yield Entry(Packed(f"{title}, replayed", stepped, False), model, title)
        stepped = fuse_(llamas.sharing(model), cache=dtype_name)
        yield Entry(Packed(f"{plain}, fuse_, replayed", stepped, exact), model, plain)
        for cache in self.args.cache:
            title = f"{plain}, fuse_, cache {cache}, replayed"
            stepped = fuse_(llamas.sharing(model), cache=cache)
            yield Entry(Packed(title, stepped, False, cache), model, plain)

    def and_graphs(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        """The entries, and on cuda those that can be captured, with a cache just as long."""
        yield from entries
        if self.device.type != "cuda" or self.args.no_graph:
            return
        length = slots(max(self.args.contexts), self.args.new_tokens)
        for system, weights, plain in entries:
            # Not a system with a cache of its own, nor eager dense experts: their loop waits for
            # the device.
            is_plain = type(system) is Transformers and system.make is None
            if is_plain and system.experts in (None, "grouped_mm"):
                given = (f"{system.name}, graph", system.model, system.exact, length)
                made = Graph(*given, experts=system.experts)
                yield Entry(made, weights, plain and f"{plain}, graph")

    def peers(self, name: str, model: Any) -> Iterator[Entry]:
        room = slots(max(self.args.prompt, *self.args.contexts), self.args.new_tokens)
        for program in () if self.args.no_peers else PROGRAMS:
            what = f"{program.title} {name}"
            if why := program.missing(name, self.device.type):
                self.skip(what, why)
                continue
            status(f"{self.source.name}: {what}")
            for cache in (None, *(c for c in self.args.cache if program.has_cache(c))):
                given = (model, name, self.folder, self.args.threads, room, cache)
                yield Entry(program(*given), model)


def slots(context: int, new_tokens: int) -> int:
    """Of a cache of constant size: room for a check, a context and a round."""
    tokens = max(context, CHECKED_TOKENS) + new_tokens + BEYOND
    return -(-tokens // BEYOND) * BEYOND


def dense_name(dtype: torch.dtype) -> str:
    return f"transformers {DTYPE_NAMES[dtype]}"


@dataclass
class Race:
    """Times of one system."""

    system: Any
    fields: Record
    plain: Race | None = None  # the race of the same model before fuse_
    steps: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)  # the main thread's, until feed() returns
    prefills: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # median step of each

    def clear(self) -> None:
        for samples in (self.steps, self.hosts, self.prefills, self.rounds):
            samples.clear()

    def round(self, prompt: Sequence[int], context: int, new_tokens: int) -> None:
        """One prefill, then new_tokens greedy steps after a context."""
        time.sleep(PAUSE_SECONDS)
        self.system.reset()
        if getattr(self.system, "prefills", True):
            start = time.perf_counter()
            int(self.system.feed(prompt).argmax())
            self.prefills.append(time.perf_counter() - start)
            self.system.reset()
        self.decode(int(self.system.feed(prompt[:context]).argmax()), new_tokens)

    def decode(self, token: int, new_tokens: int) -> None:
        """Greedy steps."""
        for _ in range(new_tokens):
            start, busy = time.perf_counter(), time.thread_time()
            logits = self.system.feed([token])
            self.hosts.append(time.thread_time() - busy)
            token = int(logits.argmax())
            self.steps.append(time.perf_counter() - start)
        self.rounds.append(median(self.steps[-new_tokens:]))

    def record(self, prompt: int = 0) -> Record:
        step, out = Timing.of(self.steps), dict(self.fields)
        out |= step.fields("decode", lambda s: 1 / s) | step.fields("ms", lambda s: 1e3 * s)
        out |= {"decode_count": step.count, "host_ms": 1e3 * median(self.hosts)}
        if self.prefills:
            t = Timing.of(self.prefills)
            out |= t.fields("prefill", lambda s: prompt / s) | {"prefill_count": t.count}
        if self.plain is not None:  # round by round, so that the machine's load is that of both
            pairs = zip(self.plain.rounds, self.rounds, strict=True)
            out |= Timing.of([plain / fused for plain, fused in pairs]).fields("gain")
        return out


def raced(
    builder: Builder,
    entries: Sequence[Entry],
    fields: Record,
    error_of: Callable[[Entry], float],
    turn: Callable[[Race, int], None],
    pick: random.Random,
) -> Iterator[Race]:
    """The systems of a model, each checked, then timed by turns of so many tokens."""
    args, title = builder.args, builder.source.title
    exact_error, races = 0.0, dict[str, Race]()
    for entry in entries:
        system = entry.system
        status(f"{builder.source.name}: {system.name}: check")
        try:
            error = error_of(entry)
        except Exception as e:
            if getattr(system, "is_eager", True):
                raise
            # A graph refuses what a model may do: the other systems run, the run fails.
            why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
            builder.skip(f"{builder.source.name}, {system.name}", why, ok=False)
            continue
        exact_error = exact_error or error
        limit = EXACT_FACTOR * exact_error if system.exact else system.limit
        about = {"model": title, "system": system.name, "device": builder.device.type}
        about |= {"error": error, "ok": error <= limit}
        races[system.name] = Race(system, fields | about, races.get(entry.plain or ""))
    for i in range(args.repetitions + 1):
        status(f"{builder.source.name}: round {i} of {args.repetitions}")
        for race in pick.sample([*races.values()], len(races)):
            turn(race, args.new_tokens if i else 2)
            if not i:  # a first turn is not counted
                race.clear()
    yield from races.values()


def of_model(builder: Builder) -> Iterator[Record]:
    """One record per context and system; all systems decode and prefill in turns."""
    args, device, pick = builder.args, builder.device, random.Random(1)
    count = max(args.prompt, *args.contexts)
    prompt = [pick.randrange(builder.source.vocabulary) for _ in range(count)]
    reference, entries = Reference(builder.source), [*builder.entries()]

    def error_of(entry: Entry) -> float:
        return reference.error(prompt[:CHECKED_TOKENS], entry.system, entry.weights)

    for context in args.contexts:

        def turn(race: Race, new_tokens: int, context: int = context) -> None:
            race.round(prompt, context, new_tokens)

        fields = {"kind": "tokens", "prompt": count, "context": context}
        for race in raced(builder, entries, fields, error_of, turn, pick):
            system = race.system
            record = race.record(count) | {"weight_bytes": system.weight_bytes}
            if isinstance(system, Transformers):
                status(f"{builder.source.name}: {system.name}: shares")
                system.reset()
                system.feed(prompt[:context])
                record |= shares.of_system(system, prompt[0], device, args.chip).record()
                if device.type == "cuda" and system.prefills:
                    record["prefill_gpu_ms"] = 1e3 * gpu_seconds(system, prompt)
            yield record
    yield from builder.skipped


def gpu_seconds(system: System, prompt: Sequence[int]) -> float:
    """The time of the kernels of one prompt, which the host's does not hide."""

    def read() -> None:
        system.reset()
        system.feed(prompt)

    return sum(shares.profiled(read, steps=2).seconds.values())


def run(run: Run) -> Iterator[Record]:
    """The records of every model named; one that says so where the model's package is missing.

    ValueError: options that do not go together.
    """
    args, device, dtype = run.args, run.device, run.device.dtype
    if args.write:
        raise ValueError("--write goes with --ops")
    args.contexts = parse_ints(args.context)
    args.cache = caches_named(args.cache) if args.cache else ()
    found = [*llamas.sources(args.models, device.type, dtype)]
    yield from (s for s in found if not isinstance(s, llamas.Source))
    for source in (s for s in found if isinstance(s, llamas.Source)):
        with tempfile.TemporaryDirectory() as folder:
            yield from of_model(Builder(source, args, device, dtype, Path(folder)))
        if device.type == "cuda":
            torch.cuda.empty_cache()

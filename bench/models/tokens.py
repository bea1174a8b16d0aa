"""What a token costs in whole models, decoded greedily at batch 1 after a prefill.

Decoding is a loop of model(...) calls with a key-value cache, without the work generate() adds.
Each system is checked, all are timed in turns, and then it is found where its time goes.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from torch_metalmm import activations_, formats, fuse_

from ..devices import Device
from ..peers import llama_cpp_model, mlx_model
from ..runner import Record, Run
from ..tables import status
from ..timing import PAUSE_SECONDS, Timing
from . import llamas, shares
from .systems import Compiled, Graph, Packed, System, Transformers

CHECKED_TOKENS = 32
BEYOND = 16  # tokens that a cache of constant size has room for beyond those of a round
# Errors of the logits against float64: as a multiple of transformers' own f32 error, and for
# engines that round activations. A wrong layer is off by about 1.
EXACT_FACTOR, ROUNDED_LIMIT = 10.0, 0.1


def last_logits(system: System, tokens: Sequence[int]) -> Tensor:
    """Those after the tokens, float64 on the CPU, the last token by a step of decoding."""
    system.reset()
    system.feed(tokens[:-1])
    return system.feed(tokens[-1:]).cpu().double()


def distance(given: Tensor, wanted: Tensor) -> float:
    """|given - wanted| / |wanted|."""
    return float((given - wanted).norm() / wanted.norm())


class Reference:
    """The logits that systems are compared with, after some tokens.

    Of a small model: in float64, with the weights of each system in turn. Of a large one: those of
    the first system that has the weights.
    """

    def __init__(self, source: llamas.Source, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.model = None if source.is_large else source.dense(torch.float64).cpu()
        if self.model is not None and source.experts:
            self.model.config._experts_implementation = "eager"  # the others take no float64
        self._wanted: tuple[object, Tensor] = (None, torch.empty(0))

    def error(self, system: System, weights: nn.Module) -> float:
        """|logits - wanted| / |wanted|, the last of the tokens by a step of decoding."""
        given = last_logits(system, self.tokens)
        if self._wanted[0] is not weights:
            self._wanted = weights, self._of(weights, given)
        return distance(given, self._wanted[1])

    def _of(self, weights: nn.Module, given: Tensor) -> Tensor:
        if self.model is None:
            return given
        self.model.load_state_dict(llamas.dense_state(weights), strict=False)
        return Transformers("f64", self.model).feed(self.tokens).double()


@dataclass
class Entry:
    """A system, a model that holds its weights, and the system that its gain refers to."""

    system: System
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
    deadline: float = math.inf  # on time.monotonic(): nothing more is compiled then
    skipped: list[Record] = field(default_factory=list)

    def entries(self) -> Iterator[Entry]:
        dense, packed = [*self.dense()], []
        yield from dense
        yield from self.graphs(dense)
        for name in self.args.formats.split(","):
            status(f"{self.source.name}: packing {name}")
            of_format = [*self.packed(name)]
            yield from of_format
            yield from self.graphs(of_format)
            if not self.args.no_peers:
                yield from self.peers(name, of_format[0].weights)
            packed.append(of_format)
        if self.args.compile:  # one format before the others, since the budget may end
            yield from self.compiled([*packed[0], *dense, *chain.from_iterable(packed[1:])])

    def failed(self, system: System, error: Exception) -> None:
        """Notes that a form of a model does not run: the other systems do, the run fails."""
        why = (str(error).splitlines() or [""])[0]
        what = f"{self.source.name}, {system.name}"
        record = {"kind": "skipped", "what": what, "why": f"{type(error).__name__}: {why}"}
        self.skipped.append(record | {"ok": False})

    def dense(self) -> Iterator[Entry]:
        dtypes = [torch.float16] if self.device.type != "cpu" else [torch.float32, torch.bfloat16]
        if self.source.experts:  # whose grouped_mm is of bf16
            dtypes = [torch.bfloat16] if self.source.is_large else [torch.float32]
        for dtype in dtypes:
            model = self.source.dense(dtype)
            short = str(dtype).replace("torch.float", "f").replace("torch.bfloat", "bf")
            exact = dtype is torch.float32
            for experts in self.source.experts or (None,):
                name = f"transformers {short}" + (f", {experts}" if experts else "")
                yield Entry(Transformers(name, model, exact, experts), model)

    def packed(self, name: str) -> Iterator[Entry]:
        exact, name = self.dtype is torch.float32, formats.get(name).name
        model = self.source.packed(name)
        plain = f"metalmm {name}"
        yield Entry(Transformers(plain, model, exact), model)
        if not self.args.no_fuse:
            fused = fuse_(llamas.sharing(model))
            yield Entry(Transformers(f"{plain}, fuse_", fused, exact), model, plain)
            if self.args.activations:
                rounded = activations_(llamas.sharing(fused), self.args.activations)
                title = f"{plain}, fuse_, {self.args.activations} x"
                yield Entry(Transformers(title, rounded, False), model, f"{plain}, fuse_")
                cached = Packed(f"{title}, PackedCache", llamas.sharing(rounded), False)
                yield Entry(cached, model, title)

    def graphs(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        if self.device.type == "cuda" and not self.args.no_graph:
            yield from self.in_form(entries, Graph, "graph")

    def compiled(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        for entry in self.in_form(entries, Compiled, "compiled"):
            if time.monotonic() > self.deadline:
                why = f"--budget of {self.args.budget} s"
                what = f"{self.source.name}, {entry.system.name}"
                self.skipped.append({"kind": "skipped", "what": what, "why": why})
            else:
                yield entry

    def in_form(self, entries: Sequence[Entry], form: type, word: str) -> Iterator[Entry]:
        """The transformers models among the entries in another form, with a cache just as long."""
        tokens = max(self.args.context, CHECKED_TOKENS) + self.args.new_tokens + BEYOND
        length = -(-tokens // BEYOND) * BEYOND
        for e in entries:
            # A Packed has a cache of its own; a graph of eager dense experts cannot be, their
            # loop waits for the device.
            if type(e.system) is Transformers and e.system.experts in (None, "grouped_mm"):
                name = f"{e.system.name}, {word}"
                plain = e.plain and f"{e.plain}, {word}"
                system = form(name, e.system.model, e.system.exact, length)
                system.experts = e.system.experts
                yield Entry(system, e.weights, plain)

    def peers(self, name: str, packed: Any) -> Iterator[Entry]:
        for peer in (llama_cpp_model, mlx_model):
            why = peer.missing(name, self.device.type)
            if why is None:
                status(f"{self.source.name}: {peer.NAME} {name}")
                room = packed.config.max_position_embeddings
                system = peer.load(packed, name, self.folder, self.args.threads, room)
                yield Entry(system, packed)
            else:
                what = f"{peer.NAME} {name}"
                self.skipped.append({"kind": "skipped", "what": what, "why": why})


@dataclass
class Race:
    """Times of one system."""

    system: System
    fields: Record
    plain: Race | None = None  # of the same model before fuse_
    steps: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)  # of the main thread, until feed() returns
    prefills: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # median step of each

    def clear(self) -> None:
        self.steps, self.hosts, self.prefills, self.rounds = [], [], [], []

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

    def record(self, prompt: int) -> Record:
        out = dict(self.fields)
        for name, samples, tokens in (
            ("decode", self.steps, 1),
            ("prefill", self.prefills, prompt),
        ):
            if not samples:
                continue
            t = Timing.of(samples)
            out |= {name: tokens / t.median, name + "_q1": tokens / t.q3}
            out |= {name + "_q3": tokens / t.q1, name + "_count": t.count}
        t = Timing.of(self.steps)
        out |= {"ms": 1e3 * t.median, "ms_q1": 1e3 * t.q1, "ms_q3": 1e3 * t.q3}
        out["host_ms"] = 1e3 * median(self.hosts)
        if self.plain is not None:  # round by round, so that the machine's load is that of both
            pairs = zip(self.plain.rounds, self.rounds, strict=True)
            t = Timing.of([plain / fused for plain, fused in pairs])
            out |= {"gain": t.median, "gain_q1": t.q1, "gain_q3": t.q3}
        return out


def checked(builder: Builder, prompt: Sequence[int]) -> Iterator[Race]:
    """The systems of a model, each compared with the reference."""
    source = builder.source
    reference = Reference(source, prompt[:CHECKED_TOKENS])
    exact_error, races = 0.0, {}
    for entry in builder.entries():
        system = entry.system
        status(f"{source.name}: {system.name}: check")
        try:
            error = reference.error(system, entry.weights)
        except Exception as e:
            if getattr(system, "is_eager", True):
                raise
            builder.failed(system, e)  # torch.compile and graphs refuse what a model may do
            continue
        exact_error = exact_error or error
        limit = EXACT_FACTOR * exact_error if system.exact else ROUNDED_LIMIT
        fields = {"kind": "tokens", "system": system.name, "prompt": len(prompt)}
        fields |= {"weight_bytes": system.weight_bytes, "error": error, "ok": error <= limit}
        fields |= {"model": source.title, "device": builder.device.type}
        fields["context"] = builder.args.context
        plain = races.get(entry.plain)
        races[system.name] = Race(system, fields, plain)
        yield races[system.name]


def of_model(builder: Builder) -> Iterator[Record]:
    """One record per system; all of them decode and prefill in turns."""
    args, name = builder.args, builder.source.name
    pick = random.Random(1)
    prompt = [pick.randrange(builder.source.vocabulary) for _ in range(args.prompt)]
    races = [*checked(builder, prompt)]
    yield from builder.skipped
    for race in races:
        race.round(prompt, args.context, 2)
        race.clear()
    for i in range(args.repetitions):
        status(f"{name}: round {i + 1} of {args.repetitions}")
        for race in pick.sample(races, len(races)):
            race.round(prompt, args.context, args.new_tokens)
    for race in races:
        record = race.record(len(prompt))
        if isinstance(race.system, Transformers):
            status(f"{name}: {race.system.name}: shares")
            race.system.reset()
            race.system.feed(prompt[: args.context])
            found = shares.of_system(race.system, prompt[0], builder.device, args.chip)
            record |= found.record()
            if builder.device.type == "cuda" and race.system.prefills:
                record["prefill_gpu_ms"] = 1e3 * gpu_seconds(race.system, prompt, builder.device)
        yield record


def gpu_seconds(system: System, prompt: Sequence[int], device: Device) -> float:
    """The time of the kernels of one prompt, which the host's does not hide."""

    def read() -> None:
        system.reset()
        system.feed(prompt)

    found = shares.profiled(read, device, steps=2)
    return sum(found.seconds.values()) if found.seconds else float("nan")


def run(run: Run) -> Iterator[Record]:
    """The records of every model named."""
    args, device, dtype = run.args, run.device, run.device.dtype
    sources = []
    for found in llamas.sources(args.models, device.type, dtype):
        if isinstance(found, llamas.Source):
            sources.append(found)
        else:
            yield found
    start = time.monotonic()
    for i, source in enumerate(sources):
        deadline = start + args.budget * (i + 1) / len(sources)
        with tempfile.TemporaryDirectory() as folder:
            yield from of_model(Builder(source, args, device, dtype, Path(folder), deadline))
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()

"""The time of a step of decoding where nothing is computed: layers of tiny weights, on the CPU.

Two models that differ in the number of their layers step by turns: the difference is what a layer
costs, and what the layers leave of a step lies beside them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_metalmm import fuse_, quantize_
from torch_metalmm.hf.decoding import decode
from torch_metalmm.hf.replay import replayed
from torch_metalmm.models.cache_argument import with_cache

from ..devices import CPU
from ..runner import Record, Run, named
from ..timing import Timing, by_turns, wall_clock
from . import llamas, shares
from .systems import Packed, Transformers

FEW, MANY = 2, 12  # layers
HIDDEN = 64
CONTEXT = 32
BURST = 8  # steps in a turn of a model
_COUNTS = ("ops_us", "our_ops", "other_ops", "views")  # a layer's ops, where they are seen


def tiny_llama(layers: int) -> Any:
    """A Llama of hidden size 64 whose blocks fit the formats of 32 values."""
    return llamas.random_llama(llamas.Shape(HIDDEN, layers, 2 * HIDDEN, HIDDEN, 4, 2, HIDDEN // 4))


Pair = tuple[float, float]  # seconds of few layers, and of many


class Stepped:
    """A system of few layers and one of many."""

    def __init__(self, name: str, models: Sequence[nn.Module], form: Any = Transformers) -> None:
        self.name = name
        self.systems = [form(name, model) for model in models]

    def turn(self) -> Pair:
        """Seconds of a step of each."""
        few, many = map(self.seconds, self.systems)
        return few, many

    def seconds(self, system: Any) -> float:
        """The median of a burst of steps, from the same context."""
        system.reset()
        system.feed(range(CONTEXT))
        return Timing.of([wall_clock(lambda: system.feed([1])) for _ in range(BURST)]).median

    def record(self, turns: Sequence[Pair]) -> Record:
        """Microseconds: medians and quartiles over the turns of a layer's share."""
        few, many = ([pair[i] for pair in turns] for i in (0, 1))
        each = [(b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True)]
        t, step = Timing.of(each), Timing.of(few).median
        out: Record = {"kind": "layers", "system": self.name}
        out |= t.fields("layer_us", lambda s: 1e6 * s)
        return out | {"beside_us": 1e6 * (step - FEW * t.median)} | self.ops(few, many)

    def ops(self, few: list[float], many: list[float]) -> Record:
        """The numbers of ops that a layer calls, and the time of these ops in rows."""
        if type(self.systems[0]) is not Transformers or self.systems[0].make:
            return dict.fromkeys(_COUNTS)
        calls = [shares.watched(lambda s=s: s.feed([1])) for s in self.systems]
        timed = [sum(shares.in_rows(c, CPU).seconds.values()) for c in calls]
        kinds = [[call.kind for call in c] for c in calls]

        def each(*wanted: str | None) -> float:
            less, more = (sum(kind in wanted for kind in found) for found in kinds)
            return (more - less) / (MANY - FEW)

        return {
            "ops_us": 1e6 * (timed[1] - timed[0]) / (MANY - FEW),
            "our_ops": each("packed", "ours"),
            "other_ops": each("attention", "others"),
            "views": each(None),
        }


class Replays(Stepped):
    """Calls of a model whose steps are replayed; the list of their ops is timed alone, too."""

    def __init__(self, name: str, models: Sequence[nn.Module]) -> None:
        super().__init__(name, models, Packed)
        self.lists: list[Pair] = []  # seconds of the lists in each turn

    def turn(self) -> Pair:
        steps, lists = zip(*map(self.both, self.systems), strict=True)
        self.lists.append(lists)
        return steps

    def both(self, system: Any) -> Pair:
        """Seconds of a replayed step, and of its list alone."""
        system.reset()
        system.feed(range(CONTEXT))
        model: Any = system.model
        given = {"input_ids": torch.ones(1, 1, dtype=torch.long), "use_cache": True}
        given |= {**with_cache(model, system.cache), "position_ids": torch.tensor([[CONTEXT]])}
        steps = [wall_clock(lambda: model(**given)) for _ in range(2 * BURST)]
        found = replayed(model)
        assert found is not None and not found.why, found
        (step,) = (s for s in found.kinds() if s.run is not None)
        runs = [wall_clock(step.native.run) for _ in range(BURST)]
        return Timing.of(steps[BURST:]).median, Timing.of(runs).median

    def ops(self, few: list[float], many: list[float]) -> Record:
        """The time of the list, and what Python takes for a layer and for a step."""
        lists = [Timing.of([*of]).median for of in zip(*self.lists[1:], strict=True)]
        less, more = (Timing.of(s).median - ops for s, ops in zip((few, many), lists, strict=True))
        layer = (more - less) / (MANY - FEW)
        return dict.fromkeys(_COUNTS) | {
            "ops_us": 1e6 * (lists[1] - lists[0]) / (MANY - FEW),
            "python_layer_us": 1e6 * layer,
            "python_us": 1e6 * (less - FEW * layer),
        }


class Generated(Stepped):
    """A token of generate(), whose steps are replayed."""

    def __init__(self, name: str, models: Sequence[nn.Module], **how: Any) -> None:
        super().__init__(name, models)
        self.how = how

    def seconds(self, system: Any) -> float:
        prompt = torch.ones(1, CONTEXT, dtype=torch.long)
        return token_of_answer(system.model, prompt, BURST, 2 * BURST, **self.how)

    def ops(self, few: list[float], many: list[float]) -> Record:
        return dict.fromkeys(_COUNTS)


def token_of_answer(model: Any, prompt: Tensor, short: int, more: int, **how: Any) -> float:
    """Seconds of one of the `more` tokens of an answer beyond `short`; prompt: int64 [1, S]."""
    given = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
    answer = partial(model.generate, prompt, **given)
    few, many = (wall_clock(partial(answer, max_new_tokens=n)) for n in (short, short + more))
    return (many - few) / more


def stepped(names: Sequence[str], args: Any) -> Iterator[Stepped]:
    """The systems of a run; fused ones follow those they are compared with."""
    dense = [tiny_llama(layers) for layers in (FEW, MANY)]
    yield Stepped("transformers f32", dense)
    for name in names:
        plain = [quantize_(copy.deepcopy(m), name, progress=False) for m in dense]
        fused = [] if args.no_fuse else [fuse_(copy.deepcopy(m)) for m in plain]
        for label, models in ((f"metalmm {name}", plain), (f"metalmm {name}, fuse_", fused)):
            if models:
                yield Stepped(label, models)
                if models is fused:
                    cached = [fuse_(copy.deepcopy(m), cache="f32") for m in plain]
                    own = [copy.deepcopy(m) for m in fused]  # whose attention another is
                    yield Stepped(f"{label}, PackedCache", own, Packed)
                    yield Replays(f"{label}, replayed", cached)
                    for how, given in (("generate", {}), ("decode", {"custom_generate": decode})):
                        of_loop = [fuse_(copy.deepcopy(m), cache="f32") for m in plain]
                        yield Generated(f"{label}, replayed, {how}", of_loop, **given)


def run(run: Run) -> Iterator[Record]:
    """One record per system; all step in turns."""
    args, names = run.args, named(run.args.formats)
    fit = [n for n in names if llamas.resolve_format(n, HIDDEN) == n]
    systems = [*stepped(fit or ["q4_0"], args)]
    found = by_turns({s.name: s.turn for s in systems}, args.repetitions)
    model = f"Llama of hidden size {HIDDEN}, {args.threads} thread" + "s" * (args.threads > 1)
    records = {s.name: s.record(found[s.name]) | {"model": model} for s in systems}
    for name, record in records.items():
        plain = records.get(name.replace(", fuse_", ""))
        if plain is not None and plain is not record:
            record["of_unfused"] = record["layer_us"] / plain["layer_us"]
        yield record

"""Tokens per second of a whole model: a random Llama, decoded greedily at batch 1 after a prefill.

Decoding is a loop of model(...) calls with a key-value cache, without the work generate() adds.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_metalmm import fuse_, quantize_
from torch_metalmm.nn.fused import FORMS, SwiGLU

from ..timing import PAUSE_SECONDS, Timing
from . import llama_cpp_model

SIZES = {"hidden": 1024, "layers": 8, "intermediate": 2816, "vocabulary": 32000, "heads": 16}
QUICK_SIZES = {"hidden": 256, "layers": 2, "intermediate": 512, "vocabulary": 512, "heads": 4}
CHECKED_TOKENS = 32
CONTEXT = 1024
# Errors of the logits against float64: as a multiple of transformers' own f32 error, and for
# engines that round activations. A wrong layer is off by about 1.
EXACT_FACTOR, ROUNDED_LIMIT = 10.0, 0.1


class System(Protocol):
    """A model that continues a sequence."""

    name: str
    exact: bool  # activations are not rounded below f32
    weight_bytes: int

    def reset(self) -> None:
        """Forgets the sequence."""
        ...

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Appends tokens; the logits f32 [vocabulary] after the last."""
        ...


@dataclass
class Transformers:
    """A transformers model, dense or with packed weights."""

    name: str
    model: nn.Module
    exact: bool = True
    weight_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        self.reset()

    def reset(self) -> None:
        self.cache: Any = None

    def feed(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens])
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        logits: Tensor = out.logits[0, -1].float()
        return logits


def random_llama(sizes: dict[str, int]) -> Any:
    """LlamaForCausalLM in f32, seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        intermediate_size=sizes["intermediate"],
        vocab_size=sizes["vocabulary"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
        max_position_embeddings=CONTEXT,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with packed weights decoded."""
    state: dict[str, Tensor] = {name: p for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if hasattr(module, "dequantize") and hasattr(module, "format"):
            state[f"{name}.weight"] = module.dequantize()
    return state


class Reference:
    """The model in float64, given the weights of each system in turn."""

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        self.model, self.tokens = copy.deepcopy(model).double(), tokens

    def error(self, system: System, weights: nn.Module) -> float:
        """|logits - logits64| / |logits64| after the tokens."""
        self.model.load_state_dict(dense_state(weights))
        wanted = Transformers("f64", self.model).feed(self.tokens)
        system.reset()
        given = system.feed(self.tokens)
        return float((given - wanted).double().norm() / wanted.double().norm())


def build_systems(
    model: Any, args: Any, folder: Path, progress: Callable[[str], None]
) -> Iterator[tuple[System, nn.Module]]:
    """Each system, and a model that holds its weights."""
    yield Transformers("transformers f32", model), model
    rounded = copy.deepcopy(model).bfloat16()
    yield Transformers("transformers bf16", rounded, exact=False), rounded
    for name in args.formats.split(","):
        progress(f"packing {name}")
        packed = quantize_(copy.deepcopy(model), name, progress=False)
        yield Transformers(f"metalmm {name}", packed), packed
        if args.fuse:
            yield from ((system, packed) for system in fused(packed, name))
        if not args.no_peers and llama_cpp_model.missing() is None:
            yield llama_cpp_model.load(packed, name, folder, args.threads), packed


def fused(packed: nn.Module, name: str) -> Iterator[System]:
    """The packed model after fuse_ in each form of its MLPs; one form is fuse_'s own choice."""
    mlps = (m for m in fuse_(copy.deepcopy(packed)).modules() if isinstance(m, SwiGLU))
    chosen = [m.form for m in mlps]
    for form in FORMS:
        of = f", chosen for {chosen.count(form)} of {len(chosen)} MLPs"
        yield Transformers(f"metalmm {name}, fuse_ {form}{of}", fuse_(copy.deepcopy(packed), form))


@dataclass
class _Race:
    """Times of one system."""

    system: System
    fields: dict[str, Any]
    plain: _Race | None = None  # of the same model before fuse_
    steps: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # median step of each

    def clear(self) -> None:
        self.steps, self.prefills, self.rounds = [], [], []

    def round(self, prompt: Sequence[int], new_tokens: int) -> None:
        """One prefill, then new_tokens greedy steps from a short context."""
        time.sleep(PAUSE_SECONDS)
        self.system.reset()
        start = time.perf_counter()
        self.system.feed(prompt)
        self.prefills.append(time.perf_counter() - start)
        self.system.reset()
        token = int(self.system.feed(prompt[:CHECKED_TOKENS]).argmax())
        for _ in range(new_tokens):
            start = time.perf_counter()
            token = int(self.system.feed([token]).argmax())
            self.steps.append(time.perf_counter() - start)
        self.rounds.append(median(self.steps[-new_tokens:]))

    def record(self, prompt: int) -> dict[str, Any]:
        out = dict(self.fields)
        for name, samples, tokens in (
            ("decode", self.steps, 1),
            ("prefill", self.prefills, prompt),
        ):
            t = Timing.of(samples)
            out |= {name: tokens / t.median, name + "_q1": tokens / t.q3}
            out |= {name + "_q3": tokens / t.q1, name + "_count": t.count}
        if self.plain is not None:  # round by round, so that the machine's load is that of both
            pairs = zip(self.plain.rounds, self.rounds, strict=True)
            t = Timing.of([plain / fused for plain, fused in pairs])
            out |= {"gain": t.median, "gain_q1": t.q1, "gain_q3": t.q3}
        return out


def run(args: Any, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One record per system; all of them decode and prefill in turns."""
    model = random_llama(QUICK_SIZES if args.quick else SIZES)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    pick = random.Random(1)
    prompt = [pick.randrange(model.config.vocab_size) for _ in range(args.prompt)]
    reference = Reference(model, prompt[:CHECKED_TOKENS])
    races, exact_error = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for system, weights in build_systems(model, args, Path(folder), progress):
            progress(f"{system.name}: check")
            error = reference.error(system, weights)
            exact_error = exact_error or error
            limit = EXACT_FACTOR * exact_error if system.exact else ROUNDED_LIMIT
            fields = {"kind": "tokens", "system": system.name, "prompt": len(prompt)}
            fields |= {"weight_bytes": system.weight_bytes, "error": error, "ok": error <= limit}
            fields["model"] = f"random Llama, {millions:.0f} M parameters"
            plain = next(
                (r for r in races if system.name.startswith(f"{r.system.name}, fuse_")), None
            )
            races.append(_Race(system, fields, plain))
        del reference
        for race in races:
            race.round(prompt, 2)
            race.clear()
        for i in range(args.repetitions):
            progress(f"round {i + 1} of {args.repetitions}")
            for race in pick.sample(races, len(races)):
                race.round(prompt, args.new_tokens)
        yield from (race.record(len(prompt)) for race in races)

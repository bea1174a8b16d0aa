"""A token of Llama 3.1 8B, its vocabulary and as many layers as memory and time allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch_metalmm import formats
from torch_metalmm.tools.cost_model import Chip
from torch_metalmm.tools.token_time import token_time

from ..devices import CPU
from ..problem import Setting
from ..tables import Record

Progress = Callable[[str], None]
FORMAT = "q4_k"
WHOLE = "8b"
MEMORY_PART = 1 / 4  # part of the device's memory: others run there, too
STACK_SECONDS = 30.0
ROUNDS, TOKENS = 3, 8
CONTEXT = {"cpu": 32, "cuda": 128, "mps": 128}
PASSES_OF_PROMPT = 4  # passes of a round: its prefill, its context, and the check


def bytes_of(shape: Any, format: str) -> tuple[float, float]:
    """Packed bytes of a layer, and of what is beside the layers."""
    whole, empty = (replace(shape, layers=n).parameters for n in (1, 0))
    per_value = formats.get(format).row_bytes(shape.hidden) / shape.hidden
    return (whole - empty) * per_value, empty * per_value


def layers_of(shape: Any, setting: Setting, memory: float, roofs: Record) -> int:
    """How many layers fit into the memory and the time; 0: not even one."""
    layer, beside = bytes_of(shape, FORMAT)
    by_memory = (memory * MEMORY_PART - beside) / layer
    parameters = replace(shape, layers=1).parameters - replace(shape, layers=0).parameters
    prompts = PASSES_OF_PROMPT * CONTEXT[setting.device.type] * 2 * parameters
    per_round = prompts / (1e9 * roofs["gflop_s"]) + TOKENS * layer / (1e9 * roofs["read_gb_s"])
    by_time = STACK_SECONDS / (2 * ROUNDS * per_round)
    return int(min(shape.layers, by_memory, by_time))


def run(
    setting: Setting,
    memory: float,
    roofs: Record,
    chip: Chip | None,
    quick: bool,
    progress: Progress,
) -> Iterator[Record]:
    """A record for the model after quantize_ and one after fuse_, timed in turns."""
    from torch_metalmm import fuse_

    from ..models import llamas
    from ..models.systems import ROUNDED_LIMIT, Transformers
    from ..models.tokens import Race, Reference

    whole: Any = llamas.SHAPES["tiny" if quick else WHOLE]
    count = layers_of(whole, setting, memory, roofs)
    if count < 1:
        yield {"kind": "skipped", "what": "tokens", "why": "no layer fits into memory and time"}
        return
    shape = replace(whole, layers=count)
    title = f"{count} of {whole.layers} layers of {'a tiny Llama' if quick else 'Llama 3.1 8B'}"
    progress(f"{title}: packing")
    device = setting.device
    plain = llamas.packed_llama(shape, FORMAT, device.type, setting.dtype)
    forms = {"unfused": plain, "fused": fuse_(llamas.sharing(plain))}
    pick, context = random.Random(1), CONTEXT[device.type]
    prompt = [pick.randrange(shape.vocabulary) for _ in range(context)]
    source = llamas.Source("", title, True, shape.vocabulary, (), lambda _: plain, lambda _: plain)
    reference, races = Reference(source), []
    for form, model in forms.items():
        system = Transformers(form, model, device == CPU)
        error = reference.error(prompt, system, plain)
        head = {"model": title, "layers": count, "format": FORMAT, "form": form}
        head |= {"context": context, "error": error, "ok": error <= ROUNDED_LIMIT}
        races.append(Race(system, head | {"weight_bytes": system.weight_bytes}))
    for i in range(ROUNDS):
        progress(f"{title}: round {i + 1} of {ROUNDS}")
        for race in pick.sample(races, len(races)):
            race.round(prompt, context, TOKENS)
    for race in races:
        record = race.record(context)
        read = record["weight_bytes"] - beside_reads(shape)
        predicted = None
        if chip is not None:
            times = token_time(shape, FORMAT, chip, record["form"], context=context)
            predicted = times.total / 1e3
        yield {**record, "roof_ms": read / roofs["read_gb_s"] / 1e6, "predicted_ms": predicted}


def beside_reads(shape: Any) -> float:
    """Bytes of the embedding, of which a token reads a row."""
    return float(shape.vocabulary * formats.get(FORMAT).row_bytes(shape.hidden))

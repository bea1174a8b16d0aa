"""The time of a token of generate() by transformers' own loop and by hf/decoding.py's.

Llamas of random weights after fuse_(cache=...), whose steps are replayed: greedy answers, by turns
in one process. What a longer answer takes more than a shorter one is its tokens'.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import fuse_
from torch_metalmm.hf.caches.layers import DTYPE_NAMES
from torch_metalmm.hf.decoding import decode
from torch_metalmm.hf.replay import replayed

from ..runner import Record, Run, named
from ..tables import status
from ..timing import Timing, by_turns, wall_clock
from . import llamas

PROMPT, SHORT = 64, 16
LOOPS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "decode, read at once": {"custom_generate": decode, "reads_late": False},
    "decode, read one step late": {"custom_generate": decode, "reads_late": True},
}


def run(run: Run) -> Iterator[Record]:
    """One record per model and loop."""
    (format, *_) = named(run.args.formats)
    dtype = torch.float32 if run.device.type == "cpu" else torch.float16
    for name in (run.args.models or "1b").split(","):
        status(name)
        with torch.inference_mode(False), torch.no_grad():
            packed: Any = llamas.packed_llama(llamas.SHAPES[name], format, run.device.type, dtype)
            model = fuse_(packed, cache=DTYPE_NAMES[dtype])
        prompt = torch.ones(1, PROMPT, dtype=torch.long, device=run.device.type)
        given = model, prompt, SHORT, run.args.new_tokens
        ways = {loop: partial(token_of_answer, *given, **how) for loop, how in LOOPS.items()}
        found = by_turns(ways, run.args.repetitions)
        answers = {loop: each[-1][1] for loop, each in found.items()}
        steps = replayed(model)
        for loop, each in found.items():
            yield {
                "kind": "loops",
                "model": f"Llama of {name}, {format}, {dtype}",
                "loop": loop,
                **Timing.of([seconds for seconds, _ in each]).fields("ms", lambda s: 1e3 * s),
                "ok": torch.equal(answers[loop], answers["transformers"]),
                "replays": steps.replays if steps is not None else 0,
            }


def token_of_answer(
    model: Any, prompt: Tensor, short: int, more: int, **how: Any
) -> tuple[float, Tensor]:
    """(seconds of one of the `more` tokens that an answer has beyond `short`; the longer answer).

    prompt: int64 [1, S].
    """
    given = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
    answer, kept, seconds = partial(model.generate, prompt, **given), [], []
    for count in (short, short + more):
        # tolist() waits for the device.
        call = partial(lambda n: kept.append(answer(max_new_tokens=n).tolist()), count)
        seconds.append(wall_clock(call))
    return (seconds[1] - seconds[0]) / more, torch.tensor(kept[1])

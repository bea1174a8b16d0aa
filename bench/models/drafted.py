"""What drafts save: prompt lookup on tasks that repeat their text and on one that does not.

SmolLM2 as it is packed, after fuse_(cache=...): an answer without drafts and one with, by turns in
one process. The texts are the beginnings of Moby-Dick and of Python's textwrap.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import PackedCache, fuse_, load_gguf
from torch_metalmm.hf.caches.layers import DTYPE_NAMES
from torch_metalmm.hf.decoding import decode
from torch_metalmm.hf.drafts import ROWS, Pace
from torch_metalmm.models.cache_argument import cache_of_generate, with_cache
from torch_metalmm.nn.exact import exact_rows
from torch_metalmm.tools.generate import demo_model

from ..runner import Record, Run
from ..tables import status
from ..timing import Ticks
from .quality import TEXT

PROSE = TEXT.read_text()
CODE = Path(textwrap.__file__).read_text()
# {task: (what is asked, the text behind it)}
TASKS = {
    "edit prose": ("Copy the following text exactly, but write 'Whale' for 'whale'.", PROSE[:2500]),
    "edit code": ("Write this Python code with the class renamed to Wrapper.", CODE[:2500]),
    "summarize prose": ("Summarize the following text, quoting its sentences.", PROSE[:4000]),
    "summarize code": ("Explain this Python code, quoting its lines.", CODE[:4000]),
    "free text": ("Tell me a long story about a lighthouse keeper and the sea.", ""),
}
WINDOW = 1000  # tokens
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
}


def run(run: Run) -> Iterator[Record]:
    """One record per task and choice of tokens; with --inexact one per number of rows instead."""
    device, args = run.device.type, run.args
    dtype = torch.float32 if device == "cpu" else torch.float16
    with torch.inference_mode(False), torch.no_grad():
        loaded, tokenizer = load_gguf(demo_model(), device=device, dtype=dtype)
        model = fuse_(loaded, cache=DTYPE_NAMES[dtype])
    if args.inexact:
        yield from inexact(model, tokenizer, run)
        return
    for task, (asked, text) in TASKS.items():
        message = {"role": "user", "content": f"{asked}\n\n{text}".rstrip()}
        prompt = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"].to(device)
        for choice, how in CHOICES.items():
            status(f"{task}, {choice}")
            plain, drafted, equal, paces = list[float](), list[float](), list[bool](), list[Pace]()
            for _ in range(args.repetitions + 1):
                want, without = answered(model, prompt, args.new_tokens, **how)
                paces.append(Pace())
                given = how | {"draft": "lookup", "pace": paces[-1]}
                got, found = answered(model, prompt, args.new_tokens, **given)
                equal.append(torch.equal(got, want))
                plain.append(without)
                drafted.append(found)
            yield {
                "model": f"SmolLM2, {device}, answers of {args.new_tokens} tokens",
                "task": f"{task}, {prompt.shape[1]} tokens, {choice}",
                "drafts": median(p.drafted for p in paces),
                **compared(plain[1:], drafted[1:], paces, all(equal)),
            }


def compared(
    plain: Sequence[float], drafted: Sequence[float], paces: Sequence[Pace], ok: bool
) -> Record:
    """Of tokens a second without drafts and with them, by turns."""
    return {
        "kind": "drafts",
        "plain": median(plain),
        "drafted": median(drafted),
        "speed": median(b / a for a, b in zip(plain, drafted, strict=True)),
        "share": sum(p.accepted for p in paces) / max(1, sum(p.drafted for p in paces)),
        "ok": ok,
    }


def inexact(model: Any, tokenizer: Any, run: Run) -> Iterator[Record]:
    """How many of the likeliest tokens behind a text's differ where it is read in steps of several
    rows by the fastest kernels. A text starts anew after each WINDOW tokens."""
    args, device = run.args, run.device.type
    ids = tokenizer(PROSE + CODE, return_tensors="pt").input_ids[:, : args.inexact].to(device)
    cache = PackedCache(model.config, DTYPE_NAMES[model.dtype])

    def likeliest(rows: int) -> Tensor:
        found = []
        for window in ids.split(WINDOW, 1):
            cache.reset()
            for step in window.split(rows, 1):
                status(f"{rows} rows, {WINDOW * len(found)}")
                found.append(model(input_ids=step, **with_cache(model, cache)).logits[0].argmax(-1))
        return torch.cat(found)

    with torch.inference_mode(False), torch.no_grad():
        single = likeliest(1)
        for rows in ROWS[1:]:
            others = likeliest(rows)
            with exact_rows():
                exact = likeliest(rows)
            yield {
                "kind": "inexact",
                "model": f"SmolLM2, {device}, {ids.shape[1]} tokens",
                "rows": rows,
                "differ": int((others != single).sum()),
                "ok": torch.equal(exact, single),
            }


def answered(
    model: Any, prompt: Tensor, count: int, cache: Any = None, **how: Any
) -> tuple[Tensor, float]:
    """(the sequence, tokens a second behind the first). cache: one that is emptied; else a new
    one, whose steps are recorded anew."""
    torch.manual_seed(0)
    cache = PackedCache(model.config, DTYPE_NAMES[model.dtype]) if cache is None else cache
    cache.reset()
    ticks = Ticks()
    draft = {name: how.pop(name) for name in ("draft", "pace") if name in how}
    out: Tensor = model.generate(
        prompt,
        **{cache_of_generate(): cache},
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        custom_generate=partial(decode, streamer=ticks, **draft),
        **how,
    )
    return out, (len(ticks.at) - 1) / (ticks.at[-1] - ticks.at[0])

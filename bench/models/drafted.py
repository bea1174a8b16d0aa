"""The time drafts save: prompt lookup on tasks that repeat their text and on one that does not.

SmolLM2 as it is packed, after fuse_(cache=...): an answer without drafts and one with, by turns in
one process. The texts are the beginnings of Moby-Dick and of Python's textwrap.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import PackedCache, activations_, fuse_, load_gguf
from torch_metalmm.hf.caches.layers import DTYPE_NAMES
from torch_metalmm.hf.decoding import decode
from torch_metalmm.hf.drafts import Pace
from torch_metalmm.models.cache_argument import cache_of_generate
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
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
}


def run(run: Run) -> Iterator[Record]:
    """One record per task and choice of tokens."""
    device, args = run.device.type, run.args
    dtype = torch.float32 if device == "cpu" else torch.float16
    with torch.inference_mode(False), torch.no_grad():
        loaded, tokenizer = load_gguf(demo_model(), device=device, dtype=dtype)
        model = fuse_(loaded, cache=DTYPE_NAMES[dtype])
    for kind in (None, *args.activations):
        activations_(model, kind)
        title = f"SmolLM2, {device}, x {kind or 'exact'}, answers of {args.new_tokens} tokens"
        for task, (asked, text) in TASKS.items():
            message = {"role": "user", "content": f"{asked}\n\n{text}".rstrip()}
            prompt = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"].to(device)
            drafters = {f"{task}, {prompt.shape[1]} tokens": "lookup"}
            yield from raced(title, model, [prompt], drafters, args)


def raced(
    title: str,
    model: Any,
    prompts: Sequence[Tensor],
    drafters: Mapping[str, Any],
    args: Any,
    tell: Callable[[Tensor], object] | None = None,
) -> Iterator[Record]:
    """Answers without drafts and with those of each drafter, by turns; a record for each drafter
    and choice of tokens. tell: given each answer before it is drafted."""
    # As a chat keeps them, so that steps are recorded once.
    caches = {n: PackedCache(model.config, DTYPE_NAMES[model.dtype]) for n in ("", *drafters)}
    for choice, how in CHOICES.items():
        plain, others = list[float](), {name: list[float]() for name in drafters}
        paces, equal = {name: Pace() for name in drafters}, dict.fromkeys(drafters, True)
        for turn in range(1 + len(prompts) * args.repetitions):  # the first is not counted
            prompt = prompts[turn % len(prompts)]
            want, speed = answered(model, prompt, args.new_tokens, caches[""], **how)
            plain.append(speed)
            if tell is not None:
                tell(want[0])
            for name, draft in drafters.items():
                status(f"{title}, {name}, {choice}, {turn}")
                given = how | {"draft": draft, "pace": paces[name]}
                got, speed = answered(model, prompt, args.new_tokens, caches[name], **given)
                others[name].append(speed)
                equal[name] &= torch.equal(got, want)
        for name, speeds in others.items():
            pace, pairs = paces[name], zip(plain[1:], speeds[1:], strict=True)
            yield {
                "kind": "drafts",
                "model": title,
                "task": f"{name}, {choice}",
                "plain": median(plain[1:]),
                "drafted": median(speeds[1:]),
                "speed": median(with_ / without for without, with_ in pairs),
                "drafts": pace.drafted / len(speeds),
                "share": pace.accepted / max(1, pace.drafted),
                "ok": equal[name],
            }


def answered(
    model: Any, prompt: Tensor, count: int, cache: Any, **how: Any
) -> tuple[Tensor, float]:
    """(the sequence, tokens a second behind the first). The cache is emptied first."""
    torch.manual_seed(0)
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

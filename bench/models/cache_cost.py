"""`python -m bench cache`: the quality that formats of a cache cost, of SmolLM2 on the repository's
own pages, beside DynamicCache. No time is measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_metalmm
from torch_metalmm import load_gguf
from torch_metalmm.hf.caches import name_of, pair_of
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.tools.generate import demo_model

from ..runner import Record, Run
from ..tables import status
from .quality import Scores, pages

FORMATS = "f32,f16,bf16,q8_0,q5_1,q5_0,q4_1,q4_0,iq4_nl,mxfp4"
FORMATS += ",affine8_g64,affine6_g64,affine5_g64,affine4_g32,affine4_g64,affine3_g64,affine2_g64"
TOKENS, WINDOW = 8192, 1024  # tokens of the text; those predicted from one context
PROMPTS, PROMPT, ANSWER = 4, 64, 64  # greedy answers to the beginnings of windows
DYNAMIC = "DynamicCache, f32"


def run(run: Run) -> Iterator[Record]:
    """A record per cache; the first is DynamicCache's, with which all are compared."""
    names, quick = named(run.args.formats), run.args.quick
    model: Any
    model, tokenizer = load_gguf(demo_model())
    tokens, window, answer = (96, 48, 4) if quick else (TOKENS, WINDOW, ANSWER)
    ids = tokenizer(pages(), return_tensors="pt").input_ids[:, :tokens]
    model.set_attn_implementation("metalmm")
    packed = {n: partial(torch_metalmm.PackedCache, model.config, n) for n in names}
    caches = {DYNAMIC: dynamic, **packed}
    scores = {name: Scores() for name in caches}
    for start in range(0, ids.shape[1] - 1, window):
        part = ids[:, start : start + window + 1]
        wanted = None
        for name, make in caches.items():
            status(f"tokens from {start}: {name}")
            logits = model(part[:, :-1], **with_cache(model, make())).logits[0]
            given = logits.float().log_softmax(1)
            wanted = given if wanted is None else wanted
            scores[name].add(given, wanted, part[0, 1:])
    prompts = ids[0, : tokens // PROMPTS * PROMPTS].view(PROMPTS, -1)[:, : min(PROMPT, window)]
    greedy: dict[str, list[Tensor]] = {}
    for name, make in caches.items():
        status(f"{PROMPTS} answers: {name}")
        greedy[name] = answers(model, prompts, make(), answer)
    for name, found in scores.items():
        yield {
            "kind": "cache-quality",
            "model": f"SmolLM2-135M-Instruct, {found.tokens} tokens of README and docs",
            "cache": name,
            **found.record(),
            "equal": [*map(equal, greedy[name], greedy[DYNAMIC])],
            "answers": PROMPTS,
            "answer": answer,
        }


def dynamic() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def answers(model: Any, prompts: Tensor, cache: Any, count: int) -> list[Tensor]:
    """The greedy tokens after each prompt, whatever they are."""
    found, ids = [], prompts
    for _ in range(count):
        out = model(ids, logits_to_keep=1, **with_cache(model, cache))
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(ids)
    return [*torch.cat(found, 1)]


def equal(given: Tensor, wanted: Tensor) -> int:
    """How many tokens are the same before the first that is another one."""
    return int((given == wanted).long().cumprod(0).sum())


def named(text: str) -> list[str]:
    """The caches of a list, as a PackedCache calls them: "f16", "f16/q8_0"."""
    return [name_of(pair_of(name)) for name in text.split(",")]

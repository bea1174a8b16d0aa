"""`python -m bench cache`: what a context takes by the format of its cache, and what that costs.

Bytes are those of the tensors that a PackedCache of the 8B shape has. Quality is SmolLM2's on the
repository's own pages, beside DynamicCache; with --parts trained that of small models of other
families, which are trained on these pages first. No time is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_metalmm
from torch_metalmm import load_gguf
from torch_metalmm.hf.caches import name_of, pair_of
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.tools.generate import demo_model

from ..machine import ROOT, need_clone
from ..runner import Record, Run
from ..tables import status
from . import llamas
from .quality import Scores
from .trained import KINDS, LENGTH, STEPS, byte_ids, trained

PARTS = ("bytes", "quality", "trained")
FORMATS = "f32,f16,bf16,q8_0,q5_1,q5_0,q4_1,q4_0,iq4_nl,mxfp4"
FORMATS += ",affine8_g64,affine6_g64,affine5_g64,affine4_g32,affine4_g64,affine3_g64,affine2_g64"
SLOTS = (8192, 32768, 131072)
TOKENS, WINDOW = 8192, 1024  # tokens of the text; SmolLM2's predicted from one context
PROMPTS, PROMPT, ANSWER = 4, 64, 64  # greedy answers to the beginnings of windows
DYNAMIC = "DynamicCache, f32"


def run(run: Run) -> Iterator[Record]:
    """A record per format of each part. ValueError: an unknown part."""
    names, parts = named(run.args.formats), run.args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ValueError(f"--parts: {unknown[0]!r}; must be of {', '.join(PARTS)}")
    if "bytes" in parts:
        yield from map(memory, names)
    if "quality" in parts:
        try:
            model, tokenizer = load_gguf(demo_model())
            ids = tokenizer(text(), return_tensors="pt").input_ids
            what = "SmolLM2-135M-Instruct, {} tokens of README and docs"
            yield from quality(names, run.args.quick, what, model, ids, WINDOW)
        except FileNotFoundError as e:  # the model's package is not installed
            yield {"kind": "skipped", "what": "SmolLM2", "why": str(e).rpartition(": ")[2]}
    if "trained" in parts:
        ids = byte_ids(text())
        for kind in KINDS:
            status(f"training: {kind}")
            model = trained(kind, ids[:, :-TOKENS], 2 if run.args.quick else STEPS)
            what = f"{kind}, trained, {{}} bytes of docs"
            yield from quality(names, run.args.quick, what, model, ids[:, -TOKENS:], LENGTH)


def memory(name: str) -> Record:
    """Bytes of the keys and values of the 8B shape, of tensors that have sizes and no memory."""
    config = llamas.SHAPES["8b"].config()
    row = torch.empty(1, config.num_key_value_heads, 1, config.head_dim, device="meta")
    sizes = {}
    for slots in SLOTS:
        cache = torch_metalmm.PackedCache(config, name, slots=slots)
        for layer in range(config.num_hidden_layers):
            cache.update(row, row, layer)
        sizes[str(slots)] = sum(t.nbytes for c in cache.layers for t in (c.keys, c.values))
    token, halves = sizes[str(SLOTS[0])] / SLOTS[0], 2 * row.numel() * config.num_hidden_layers
    of_f16 = token / (2 * halves)
    return {"kind": "cache-bytes", "format": name, "token": token, "sizes": sizes, "of_f16": of_f16}


def text() -> str:
    """README and the pages of docs. ValueError: this is an installation, which has none."""
    need_clone("cache: quality")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(page.read_text("utf-8") for page in pages)


def quality(
    names: Sequence[str], quick: bool, what: str, model: Any, ids: Tensor, window: int
) -> Iterator[Record]:
    """A record per cache; the first is DynamicCache's, with which all are compared.

    ids: int64 [1, T]. window: of the tokens that are predicted from one context.
    """
    model.set_attn_implementation("metalmm")
    tokens, window, answer = (96, 48, 4) if quick else (TOKENS, window, ANSWER)
    ids = ids[:, :tokens]
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
            "model": what.format(found.tokens),
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

